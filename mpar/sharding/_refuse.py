"""Refuse: what a user reads if a function cannot be traced: the op, its line, and what to write instead."""

import traceback

from mpar.errors import MparError, TraceError
from mpar.sharding._watch import Watch, line_of
from mpar.torch_private import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

__all__ = ["explain", "impure"]

LONGEST = 600
"""Of a message of torch, so many characters are shown."""
READS = frozenset({"__array__", "__deepcopy__", "item", "numpy", "tolist", "data_ptr", "untyped_storage"})
"""Calls that read the data or the memory of a tensor."""
HIGHER_ORDER = {
    "flex_attention": "mpar.ops.attention",
}
"""Ops of torch that take functions, and what to use instead."""
UNSHAPED = {
    "aten.linalg_lstsq.default": "Use torch.linalg.solve(a.mT @ a, a.mT @ b), or torch.linalg.qr and solve_triangular.",
}
"""Ops of torch whose results have shapes that depend on data, and what to use instead."""
WAYS_OUT = {
    "For combine_mode='pointwise'": 'Call associative_scan with combine_mode="generic".',
    "Expected pred to be": "Take .any() or .all(); where elements choose by themselves, use torch.where.",
    "dynamo-optimized function": "Call the function without torch.compile: the whole function is compiled here.",
    "must override the setup_context": "Split its forward into forward(*operands) and setup_context(ctx, inputs, output).",
    "no fake impl registered": "Register one (register_fake), and how the op may be sharded (mpar.ops.declare_sharding).",
}
"""What torch says, and what to do."""
OTHERWISE = "If it fails in the same way on plain tensors of these shapes, correct the call; otherwise use other ops for it."
TRACED_VALUE = "get value out of a tracing tensor"
"""In the message of torch for a value of Python that comes from data."""
OF_DATA = "Use torch.where and fixed shapes, or compute the value outside and close over it."
OF_SHAPE = "Use masks and fixed shapes (torch.where) instead."


def impure(name: str, watch: Watch) -> TraceError:
    """The error of a function that does what no pure function does: all its offenders."""
    offenders = "\n  ".join(dict.fromkeys(watch.offenders))
    return TraceError(f"cannot compile {name}, it is not a pure function of static shapes:\n  {offenders}")


def explain(name: str, watch: Watch, error: Exception) -> Exception:
    """What to raise for `error`, which came up while the function `name` was traced: itself, if the user's own code raised it."""
    if watch.offenders:
        return impure(name, watch)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for frame in frames if (line := line_of(frame))]
    call, line = watch.failed or ("a call", lines[-1] if lines else "")
    at = f" at {line}" if line else ""
    if isinstance(error, MparError):
        return error if not line or line in str(error) else type(error)(f"{error}\nat {line}")
    if isinstance(error, DataDependentOutputException) or call in READS or TRACED_VALUE in str(error):
        op = getattr(error, "func", call)
        return TraceError(f"cannot trace {name}: {op}{at} makes a Python value or a shape from the data of a tensor.\n{OF_DATA}")
    if isinstance(error, (DynamicOutputShapeException, UnsupportedFakeTensorException)):
        op = getattr(error, "func", call)
        return TraceError(
            f"cannot trace {name}: the result of {op}{at} has a shape that depends on data.\n{UNSHAPED.get(str(op), OF_SHAPE)}"
        )
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
        instead = HIGHER_ORDER.get(call, "ops of torch that take no functions")
        return TraceError(f"cannot trace {name}: {call}{at} takes functions, which are not compiled.\nUse {instead}.")
    text = str(error).strip().replace("FunctionalTensor", "Tensor")
    users_own = bool(frames) and line_of(frames[-1]) and text == str(error).strip()
    if isinstance(error, Warning) or users_own:
        return error
    way_out = next((advice for said, advice in WAYS_OUT.items() if said in text), OTHERWISE)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return TraceError(f"cannot trace {name}: {call}{at} fails.\n{type(error).__name__}: {text}\n{way_out}")
