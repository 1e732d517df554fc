"""Refuse: what a user reads if a function cannot be traced: the op, its line, and what to write instead."""

import traceback

from mpar.errors import MparError, TraceError
from mpar.sharding._watch import Watch, is_users
from mpar.torch_private import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

__all__ = ["explain", "impure"]

LONGEST = 600
"""Of a message of torch, so many characters are shown."""


def impure(name: str, watch: Watch) -> TraceError:
    """The error of a function that does what no pure function does: all its offenders."""
    offenders = "\n  ".join(dict.fromkeys(watch.offenders))
    return TraceError(f"cannot compile {name}, it is not a pure function of static shapes:\n  {offenders}")


def explain(name: str, watch: Watch, error: Exception) -> Exception:
    """What to raise for `error`, which came up while the function `name` was traced: itself, if the user's own code raised it."""
    if watch.offenders:
        return impure(name, watch)
    at = f" at {watch.line}" if watch.line else ""
    if isinstance(error, DataDependentOutputException):
        return TraceError(
            f"cannot trace {name}: {error.func}{at} makes a Python value or a shape from the data of a tensor.\n"
            "Use torch.where and fixed shapes, or compute the value outside and close over it."
        )
    if isinstance(error, (DynamicOutputShapeException, UnsupportedFakeTensorException)):
        return TraceError(
            f"cannot trace {name}: the result of {getattr(error, 'func', error)}{at} has a shape that depends on "
            "data.\nUse masks and fixed shapes (torch.where) instead."
        )
    if isinstance(error, MparError) or _is_users_own(error):
        return error
    text = str(error).strip()
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return TraceError(
        f"cannot trace {name}: {watch.failed or 'a call'}{at} fails.\n{type(error).__name__}: {text}\n"
        "If it fails in the same way on plain tensors of these shapes, correct the call; otherwise use other ops for it."
    )


def _is_users_own(error: Exception) -> bool:
    """Whether the user's code, rather than torch, raised an error: its innermost frame is the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and is_users(frames[-1].f_code)
