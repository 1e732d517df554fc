"""torch's control flow as it is called: the functions that it takes become bodies, what they return is checked against its rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import TraceError
from mpar.sharding._control import Cond, Scan, While
from mpar.sharding._control_bodies import bind_scan, share_captured, slices, trace_body
from mpar.sharding._control_op import bind_flow

__all__ = ["trace_cond", "trace_scan", "trace_while_loop"]


def trace_scan(combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Tensor] = ()) -> Any:
    """What torch's scan computes along dim 0: (last carries, stacked ys), structured as `combine` returns them."""
    given = [*init, *slices(xs), *additional_inputs]
    step, returned = _flat("scan", combine)
    body, captured = trace_body("the body of scan", step, given)
    if problems := _differences("carry", init, body.results):
        raise TraceError(_message("scan", "its body returns carries that are not like those it takes", problems))
    flow = Scan(body, len(init), len(xs), 0, len(xs[0]))
    return tree.unflatten(returned[0], bind_scan(flow, [*init, *xs, *additional_inputs, *captured]))


def trace_cond(predicate: Tensor, if_true: Callable, if_false: Callable, operands: Sequence[Tensor] = ()) -> Any:
    """What torch's cond computes: what the chosen branch returns."""
    given, structure = tree.flatten(tuple(operands))
    branches = [_flat("cond", lambda *args, fn=fn: fn(*tree.unflatten(structure, args))) for fn in (if_true, if_false)]
    traced = [trace_body("a branch of cond", branch, given) for branch, _ in branches]
    returned = [structures[0] for _, structures in branches]
    (yes, no), captured = share_captured(traced, len(given))
    problems = _differences("result", yes.results, no.results)
    if problems or returned[0] != returned[1]:
        raise TraceError(_message("cond", "its branches return different things", problems or [f"{returned[0]}, {returned[1]}"]))
    results = bind_flow(Cond(yes, no), [_as_predicate("cond", predicate), *given, *captured])
    return tree.unflatten(returned[0], results)


def trace_while_loop(
    test: Callable, body: Callable, carries: Sequence[Tensor], additional_inputs: Sequence[Tensor] = (), **_: object
) -> Any:
    """What torch's while_loop computes: the carries for which `test` no longer holds, structured as `body` returns them."""
    given = [*_tensors("while_loop", carries), *additional_inputs]
    step, returned = _flat("while_loop", body)
    traced = [
        trace_body("the test of while_loop", lambda *args: [_as_predicate("while_loop", test(*args))], given),
        trace_body("the body of while_loop", step, given),
    ]
    bodies, captured = share_captured(traced, len(given))
    if problems := _differences("carry", given[: len(carries)], bodies[1].results, all_of_them=True):
        raise TraceError(_message("while_loop", "its body returns carries that are not like those it takes", problems))
    return tree.unflatten(returned[0], bind_flow(While(*bodies, len(carries)), [*given, *captured]))


def _flat(op: str, fn: Callable) -> tuple[Callable[..., list[Tensor]], list[tree.Structure]]:
    """`fn` with its results as a list, and a list that has their structure once it was called."""
    structures: list[tree.Structure] = []

    def flat(*args: Tensor) -> list[Tensor]:
        leaves, structure = tree.flatten(fn(*args))
        structures.append(structure)
        return _tensors(op, leaves)

    return flat, structures


def _tensors(op: str, values: Sequence[object]) -> list[Tensor]:
    """Numbers become tensors. Raises TraceError for anything else."""
    strange = [type(value).__name__ for value in values if not isinstance(value, (Tensor, int, float))]
    if strange:
        raise TraceError(_message(op, "its functions take and return tensors and numbers", strange))
    return [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]


def _as_predicate(op: str, value: object) -> Tensor:
    predicate = value if isinstance(value, Tensor) else torch.tensor(value)
    if predicate.dtype != torch.bool or predicate.numel() != 1:
        what = f"{str(predicate.dtype).removeprefix('torch.')}{list(predicate.shape)}"
        raise TraceError(_message(op, "its predicate must be one truth value", [f"it is {what}: compare it, or take .any() or .all()"]))
    return predicate.reshape(())


def _differences(name: str, expected: Sequence[Tensor], got: Sequence[Tensor], *, all_of_them: bool = False) -> list[str]:
    """How `got` differs from `expected` in shapes and dtypes; `got` may have more, which are of another sort."""
    if len(got) < len(expected) or (all_of_them and len(got) != len(expected)):
        return [f"{len(expected)} tensors are expected, it returns {len(got)}"]
    pairs = enumerate(zip(expected, got, strict=False))
    return [f"{name} {i}: {_text(a)} and {_text(b)}" for i, (a, b) in pairs if _text(a) != _text(b)]


def _text(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _message(op: str, problem: str, details: Sequence[str]) -> str:
    return (
        f"cannot trace {op}: {problem}.\n  " + "\n  ".join(details) + "\nMake them alike (reshape, expand, .to(dtype)), because "
        "every step and every branch runs the same graph."
    )
