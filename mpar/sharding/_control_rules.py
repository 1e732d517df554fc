"""Derivatives and batches of control flow: each is control flow whose bodies are traced from those of the given one.

A scan keeps the carries that enter each turn. Its gradient is a scan in the opposite direction, which computes each turn again
and pulls the cotangents back through it. Gradients of captured tensors are sums over all turns, so that pending sums in them stay
pending until the loop has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpar.errors import DifferentiationError
from mpar.sharding._control import Cond, Scan, While
from mpar.sharding._control_bodies import bind_scan, share_captured, slices, trace_body
from mpar.sharding._control_op import RULES, Body, FlowRules, bind_flow, interpret

__all__: list[str] = []

Maybe = Tensor | None


def _pull_back_body(body: Body, wanted: Sequence[int], given: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
    """(operands of `body`, cotangents of the results `given`) -> gradients of the operands `wanted`."""

    def pull_back(*args: Tensor) -> tuple[Tensor, ...]:
        operands, cotangents = list(args[: len(body.operands)]), args[len(body.operands) :]

        def chosen(*moved: Tensor) -> tuple[Tensor, ...]:
            for index, x in zip(wanted, moved, strict=True):
                operands[index] = x
            results = interpret(body, *operands)
            return tuple(results[index] for index in given)

        return torch.func.vjp(chosen, *(operands[index] for index in wanted))[1](tuple(cotangents))

    return pull_back


def _push_forward_body(body: Body, moving: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
    """(operands of `body`, tangents of the operands `moving`) -> (results, tangents of those that have floats)."""
    floats = _floats(body.results)

    def push_forward(*args: Tensor) -> tuple[Tensor, ...]:
        operands, tangents = list(args[: len(body.operands)]), args[len(body.operands) :]

        def chosen(*moved: Tensor) -> tuple[Tensor, ...]:
            for index, x in zip(moving, moved, strict=True):
                operands[index] = x
            return tuple(interpret(body, *operands))

        moved = tuple(operands[index] for index in moving)
        results, pushed = torch.func.jvp(chosen, moved, tuple(tangents))  # type: ignore[misc]
        return (*results, *(pushed[index] for index in floats))

    return push_forward


def _floats(values: Sequence[Tensor]) -> list[int]:
    """The numbers of the values that have derivatives."""
    return [index for index, value in enumerate(values) if value.is_floating_point() or value.is_complex()]


def _pick(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [values[index] for index in indices]


def _filled(size: int, indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A list of None, with `values` at `indices`."""
    out: list[Any] = [None] * size
    for index, value in zip(indices, values, strict=True):
        out[index] = value
    return out


def _scan_pull_back(
    flow: Scan[Body], operands: Sequence[Tensor], results: Sequence[Tensor], cotangents: Sequence[Maybe], needed: Sequence[bool]
) -> list[Maybe]:
    """The gradient of a scan whose last ys are the carries that entered each turn."""
    carries, xs, captured = flow.operands(operands)
    body, nc, nx = flow.body, flow.num_carries, flow.num_xs
    moved = _floats(carries)
    wanted_xs = [i for i in _floats(xs) if needed[nc + i]]
    wanted_captured = [i for i in _floats(captured) if needed[nc + nx + i]]
    wanted = [*moved, *(nc + i for i in wanted_xs), *(nc + nx + i for i in wanted_captured)]
    dcarries, dys, dsums = flow.parts(cotangents)
    entries = flow.parts(results)[1][-nc:] if nc else []
    init = [torch.zeros_like(carries[i]) if (dy := dcarries[i]) is None else dy for i in moved]
    given_ys = [i for i, dy in enumerate(dys) if dy is not None]
    given_sums = [i for i, dy in enumerate(dsums) if dy is not None]
    given = [*moved, *(nc + i for i in given_ys), *(nc + len(dys) + i for i in given_sums)]
    backward = _pull_back_body(body, wanted, given)
    sizes = (len(moved), nx, nc, len(given_ys), len(given_sums))

    def turn(*args: Tensor) -> tuple[Tensor, ...]:
        dcarry, x, entry, dy, dsum, outside = _split(args, sizes)
        return backward(*entry, *x, *outside, *dcarry, *dy, *dsum)

    new_xs = [*xs, *entries, *_pick(dys, given_ys)]
    new_captured = [*_pick(dsums, given_sums), *captured]
    traced, more = trace_body("the gradient of a scan", turn, [*init, *slices(new_xs), *new_captured])
    pulled = Scan(traced, len(moved), len(new_xs), len(wanted_captured), flow.length, not flow.reverse)
    gradients = bind_scan(pulled, [*init, *new_xs, *new_captured, *more])
    return _filled(len(operands), wanted, gradients)


def _split(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    """`values` in parts of these sizes, and what remains."""
    out, start = [], 0
    for size in sizes:
        out.append(values[start : start + size])
        start += size
    return [*out, values[start:]]


def _scan_push_forward(flow: Scan[Body], operands: Sequence[Tensor], tangents: Sequence[Maybe]) -> list[Maybe]:
    carries, xs, captured = flow.operands(operands)
    body, nc, nx = flow.body, flow.num_carries, flow.num_xs
    moved = _floats(carries)
    moving_xs = [i for i in range(nx) if tangents[nc + i] is not None]
    moving_captured = [i for i in range(len(captured)) if tangents[nc + nx + i] is not None]
    moving = [*moved, *(nc + i for i in moving_xs), *(nc + nx + i for i in moving_captured)]
    init = [torch.zeros_like(carries[i]) if (t := tangents[i]) is None else t for i in moved]
    txs, tcaptured = _pick(tangents[nc : nc + nx], moving_xs), _pick(tangents[nc + nx :], moving_captured)
    forward = _push_forward_body(body, moving)
    sizes = (nc, len(moved), nx, len(txs), len(captured), len(tcaptured))
    floats = _floats(body.results)

    def turn(*args: Tensor) -> tuple[Tensor, ...]:
        carry, tcarry, x, tx, outside, toutside, _ = _split(args, sizes)
        results = forward(*carry, *x, *outside, *tcarry, *tx, *toutside)
        return *results[:nc], *results[len(body.results) :]

    traced, more = trace_body("the tangents of a scan", turn, [*carries, *init, *slices([*xs, *txs]), *captured, *tcaptured])
    num_sums = sum(i >= len(body.results) - flow.num_sums for i in floats)
    pushed = Scan(traced, nc + len(moved), nx + len(txs), num_sums, flow.length, flow.reverse)
    results = bind_scan(pushed, [*carries, *init, *xs, *txs, *captured, *tcaptured, *more])
    return _filled(len(body.results), floats, results[nc:])


def _scan_batch(
    size: int, dims: Sequence[int | None], flow: Scan[Body], operands: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Carries, captured tensors and sums have the batch in front, xs and ys after the dim of the turns."""
    nc, nx = flow.num_carries, flow.num_xs
    placed = []
    for index, (x, dim) in enumerate(zip(operands, dims, strict=True)):
        x = x if dim is None else x.movedim(dim, 1 if nc <= index < nc + nx else 0)
        placed.append(x.expand(size, *x.shape) if dim is None and index < nc else x)
    batched = [0 if index < nc or dim is not None else None for index, dim in enumerate(dims)]
    carries, xs, captured = flow.operands(placed)
    traced, more = trace_body("a batch of scans", _batched(flow.body, batched), [*carries, *slices(xs), *captured])
    results = bind_flow(replace(flow, body=traced), [*placed, *more])
    carries, ys, sums = flow.parts(results)
    return results, [*(0 for _ in carries), *(1 for _ in ys), *(0 for _ in sums)]


def _batched(body: Body, dims: Sequence[int | None]) -> Callable[..., tuple[Tensor, ...]]:
    if all(dim is None for dim in dims):
        return partial(_interpreted, body)
    return torch.func.vmap(partial(_interpreted, body), in_dims=tuple(dims))


def _interpreted(body: Body, *operands: Tensor) -> tuple[Tensor, ...]:
    return tuple(interpret(body, *operands))


def _cond_pull_back(
    flow: Cond[Body], operands: Sequence[Tensor], results: Sequence[Tensor], cotangents: Sequence[Maybe], needed: Sequence[bool]
) -> list[Maybe]:
    predicate, *given = operands
    wanted = [i for i in _floats(given) if needed[1 + i]]
    read = [i for i, dy in enumerate(cotangents) if dy is not None]
    outside = [*given, *_pick(cotangents, read)]
    branches = [
        trace_body("the gradient of a branch of cond", _pull_back_body(body, wanted, read), outside)
        for body in flow.bodies.values()
    ]
    bodies, captured = share_captured(branches, len(outside))
    return _filled(len(operands), [1 + i for i in wanted], bind_flow(Cond(*bodies), [predicate, *outside, *captured]))


def _cond_push_forward(flow: Cond[Body], operands: Sequence[Tensor], tangents: Sequence[Maybe]) -> list[Maybe]:
    predicate, *given = operands
    moving = [i for i, t in enumerate(tangents[1:]) if t is not None]
    num_results = len(flow.if_true.results)

    def tangents_of(body: Body) -> Callable[..., tuple[Tensor, ...]]:
        forward = _push_forward_body(body, moving)
        return lambda *args: forward(*args)[num_results:]

    outside = [*given, *_pick(tangents[1:], moving)]
    branches = [trace_body("the tangents of a branch of cond", tangents_of(body), outside) for body in flow.bodies.values()]
    bodies, captured = share_captured(branches, len(outside))
    pushed = bind_flow(Cond(*bodies), [predicate, *outside, *captured])
    return _filled(num_results, _floats(flow.if_true.results), pushed)


def _cond_batch(
    size: int, dims: Sequence[int | None], flow: Cond[Body], operands: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """A choice that differs from example to example computes both branches."""
    placed = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, dims, strict=True)]
    front = [None if dim is None else 0 for dim in dims]
    predicate, *given = placed
    if front[0] is None:
        branches = [trace_body("a batch of branches", _batched(body, front[1:]), given) for body in flow.bodies.values()]
        bodies, captured = share_captured(branches, len(given))
        results = bind_flow(Cond(*bodies), [predicate, *given, *captured])
        return results, [0] * len(results)

    def choose(predicate: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(interpret(flow.if_true, *given), interpret(flow.if_false, *given), strict=True)
        return tuple(torch.where(predicate.reshape(()), *pair) for pair in pairs)

    results = list(torch.func.vmap(choose, in_dims=tuple(front))(*placed))
    return results, [0] * len(results)


def _while_pull_back(flow: While[Body], *_: Any) -> list[Maybe]:
    raise DifferentiationError(
        "cannot differentiate while_loop backward: how many turns it takes is known only when it runs, and its gradient would "
        "keep what each turn read.\nUse scan with a fixed number of turns, and torch.where for those after the end; or detach "
        "its operands; or take tangents (torch.func.jvp, jacfwd)."
    )


def _while_push_forward(flow: While[Body], operands: Sequence[Tensor], tangents: Sequence[Maybe]) -> list[Maybe]:
    nc = flow.num_carries
    carries, captured = operands[:nc], operands[nc:]
    moved = _floats(carries)
    moving_captured = [i for i in range(len(captured)) if tangents[nc + i] is not None]
    init = [torch.zeros_like(carries[i]) if (t := tangents[i]) is None else t for i in moved]
    given = [*carries, *init, *captured, *_pick(tangents[nc:], moving_captured)]
    forward = _push_forward_body(flow.body, [*moved, *(nc + i for i in moving_captured)])
    sizes = (nc, len(moved), len(captured))

    def turn(*args: Tensor) -> tuple[Tensor, ...]:
        carry, tcarry, outside, toutside = _split(args, sizes)
        return forward(*carry, *outside, *tcarry, *toutside)

    def test(*args: Tensor) -> list[Tensor]:
        carry, _, outside, _ = _split(args, sizes)
        return interpret(flow.test, *carry, *outside)

    pushed = _bind_while(test, turn, nc + len(moved), given, "the tangents of a while_loop")
    return _filled(nc, moved, pushed[nc:])


def _while_batch(
    size: int, dims: Sequence[int | None], flow: While[Body], operands: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """A batch of loops goes on until the last one ends; those that have ended keep their carries."""
    nc = flow.num_carries
    placed = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, dims, strict=True)]
    placed = [x.expand(size, *x.shape) if i < nc and dims[i] is None else x for i, x in enumerate(placed)]
    front = [0 if i < nc or dim is not None else None for i, dim in enumerate(dims)]

    def one(*args: Tensor) -> tuple[Tensor, ...]:
        (going,) = interpret(flow.test, *args)
        return tuple(torch.where(going.reshape(()), *pair) for pair in zip(interpret(flow.body, *args), args, strict=False))

    def test(*args: Tensor) -> list[Tensor]:
        return [_batched(flow.test, front)(*args)[0].any()]

    results = _bind_while(test, torch.func.vmap(one, in_dims=tuple(front)), nc, placed, "a batch of while_loops")
    return results, [0] * nc


def _bind_while(
    test: Callable[..., Sequence[Tensor]], body: Callable[..., Sequence[Tensor]], num_carries: int, given: list[Tensor], name: str
) -> list[Tensor]:
    traced = [trace_body(name, test, given), trace_body(name, body, given)]
    (until, turn), captured = share_captured(traced, len(given))
    return bind_flow(While(until, turn, num_carries), [*given, *captured])


RULES[Scan] = FlowRules(_scan_pull_back, _scan_push_forward, _scan_batch)
RULES[Cond] = FlowRules(_cond_pull_back, _cond_push_forward, _cond_batch)
RULES[While] = FlowRules(_while_pull_back, _while_push_forward, _while_batch)
