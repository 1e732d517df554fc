"""torch's control flow as it is called: the functions that it takes become bodies, and what these return is checked."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import TraceError
from mpar.sharding._control import Cond, Scan, While
from mpar.sharding._control_bodies import bind_scan, share_captured, slices, trace_body
from mpar.sharding._control_op import bind_flow

__all__ = ["trace_cond", "trace_map", "trace_scan", "trace_while_loop"]

ALIKE = "Make them alike (reshape, expand, .to(dtype)): every turn and every branch has operands and results of the same shapes."
ONE_TRUTH = "Compare it with a number, or take .any() or .all(); where elements choose by themselves, use torch.where."


def trace_scan(
    combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Tensor] = ()
) -> object:
    """What torch's scan computes along dim 0: (last carries, stacked ys), structured as `combine` returns them."""
    if len(lengths := {len(x) for x in xs}) > 1:
        raise TraceError(f"cannot trace scan: its xs have different numbers of slices, {sorted(lengths)}.\nCut or pad them.")

    def pair(*operands: Tensor) -> object:
        returned = combine(*operands)
        carried = len(tree.leaves(returned[0])) if isinstance(returned, (tuple, list)) and len(returned) == 2 else None
        if carried != len(init):
            says = "no pair (carry, y)" if carried is None else f"a carry of {carried} tensors"
            raise TraceError(
                f"cannot trace scan: it carries {len(init)} tensors, and its body returns {says}.\n"
                "Return (carry, y) with a carry like the initial one; for a body that makes no y, let y be None."
            )
        return returned

    turn, returned = _flat("scan", pair)
    body, captured = trace_body("the body of scan", turn, [*init, *slices(xs), *additional_inputs])
    if problems := _differences("carry", init, body.results):
        raise _refusal("scan", "its body returns carries that are not like those it takes", problems, ALIKE)
    flow = Scan(body, len(init), len(xs), 0, len(xs[0]))
    return tree.unflatten(returned[0], bind_scan(flow, [*init, *xs, *additional_inputs, *captured]))


def trace_map(fn: Callable, xs: Sequence[Tensor], args: Sequence[Tensor] = ()) -> object:
    """What torch's map computes along dim 0: a scan that carries nothing."""
    turn, returned = _flat("map", fn)
    body, captured = trace_body("the body of map", turn, [*slices(xs), *args])
    flow = Scan(body, 0, len(xs), 0, len(xs[0]))
    return tree.unflatten(returned[0], bind_scan(flow, [*xs, *args, *captured]))


def trace_cond(predicate: Tensor, if_true: Callable, if_false: Callable, operands: Sequence[Tensor] = ()) -> object:
    """What torch's cond computes: what the chosen branch returns."""
    given, structure = tree.flatten(tuple(operands))
    branches = [_flat("cond", lambda *args, fn=fn: fn(*tree.unflatten(structure, args))) for fn in (if_true, if_false)]
    traced = [trace_body("a branch of cond", branch, given) for branch, _ in branches]
    returned = [structures[0] for _, structures in branches]
    (yes, no), captured = share_captured(traced, len(given))
    problems = _differences("result", yes.results, no.results, exactly=True)
    if not problems and returned[0] != returned[1]:
        problems = ["the tensors are the same, how they are put together is not"]
    if problems:
        raise _refusal("cond", "its branches return different things", problems, ALIKE)
    results = bind_flow(Cond(yes, no), [_as_predicate("cond", predicate), *given, *captured])
    return tree.unflatten(returned[0], results)


def trace_while_loop(
    test: Callable, body: Callable, carries: Sequence[Tensor], additional_inputs: Sequence[Tensor] = (), **_: object
) -> object:
    """What torch's while_loop computes: the carries for which `test` no longer holds, structured as `body` returns them."""
    given = [*_tensors("while_loop", carries), *additional_inputs]
    turn, returned = _flat("while_loop", body)
    traced = [
        trace_body("the test of while_loop", lambda *args: [_as_predicate("while_loop", test(*args))], given),
        trace_body("the body of while_loop", turn, given),
    ]
    (until, again), captured = share_captured(traced, len(given))
    if problems := _differences("carry", given[: len(carries)], again.results, exactly=True):
        raise _refusal("while_loop", "its body returns carries that are not like those it takes", problems, ALIKE)
    return tree.unflatten(returned[0], bind_flow(While(until, again, len(carries)), [*given, *captured]))


def _flat(op: str, fn: Callable) -> tuple[Callable[..., list[Tensor]], list[tree.Structure]]:
    """`fn` with its results as a list, and a list that has their structure once it was called."""
    structures: list[tree.Structure] = []

    def flat(*args: Tensor) -> list[Tensor]:
        leaves, structure = tree.flatten_present(fn(*args))
        structures.append(structure)
        return _tensors(op, leaves)

    return flat, structures


def _tensors(op: str, values: Sequence[object]) -> list[Tensor]:
    """Numbers become tensors. Raises TraceError for anything else."""
    strange = [type(value).__name__ for value in values if not isinstance(value, (Tensor, int, float))]
    if strange:
        raise _refusal(op, "its functions take and return tensors and numbers", strange, "Close over other values.")
    return [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]


def _as_predicate(op: str, value: object) -> Tensor:
    predicate = value if isinstance(value, Tensor) else torch.tensor(value)
    if predicate.dtype != torch.bool or predicate.numel() != 1:
        raise _refusal(op, "its predicate must be one truth value", [f"it is {_text(predicate)}"], ONE_TRUTH)
    return predicate.reshape(())


def _differences(name: str, expected: Sequence[Tensor], got: Sequence[Tensor], *, exactly: bool = False) -> list[str]:
    """How `got` differs from `expected` in shapes and dtypes; unless `exactly`, `got` may have more of another sort behind."""
    if len(got) < len(expected) or (exactly and len(got) != len(expected)):
        return [f"{len(expected)} tensors, and {len(got)} tensors"]
    pairs = enumerate(zip(expected, got, strict=False))
    return [f"{name} {i}: {_text(a)} and {_text(b)}" for i, (a, b) in pairs if _text(a) != _text(b)]


def _text(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _refusal(op: str, problem: str, details: Sequence[str], way_out: str) -> TraceError:
    return TraceError(f"cannot trace {op}: {problem}:\n  " + "\n  ".join(details) + f"\n{way_out}")
