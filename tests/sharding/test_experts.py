"""Experts on ranks: dispatch, grouped products and combine against a loop over tokens, whatever was chosen for them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpar import Mesh, ops, testing
from mpar.arrange import DISPATCHERS, arrange
from mpar.sharding import RankGraph, check, collectives_of, lower, simulate_graph, trace
from mpar.strategy import Strategy, preset

F64 = torch.float64
B, S, K, E, D, F = 8, 8, 2, 8, 6, 4
SHAPES = {"x": (B, S, D), "weights": (B, S, K), "up": (E, D, F), "down": (E, F, D), "dy": (B, S, D)}
AXES = {
    "x": ("batch", "residual_seq", "embed"),
    "weights": ("moe_batch", "moe_seq", None),
    "up": ("expert", "embed", "expert_mlp"),
    "down": ("expert", "expert_mlp", "embed"),
    "dy": ("batch", "residual_seq", "embed"),
    "experts": ("moe_batch", "moe_seq", None),
}
RESULTS = ("x", "x", "weights", "up", "down")


def chosen(name: str) -> Tensor:
    """Experts (B, S, K) of every token."""
    slots = torch.randint(0, E, (B, S, K), generator=torch.Generator().manual_seed(0))
    return {
        "any": slots,
        "the first one": torch.zeros_like(slots),
        "the last one": torch.full_like(slots, E - 1),
        "one half": slots % (E // 2),
        "by row": torch.arange(B)[:, None, None].expand(B, S, K).contiguous(),
        "some dropped": slots.masked_fill(slots % 3 == 0, -1),
        "all dropped": torch.full_like(slots, -1),
    }[name]


CHOICES = ("any", "the first one", "the last one", "one half", "by row", "some dropped", "all dropped")


def layer(weighted: bool = True):
    """An expert is x -> tanh(x @ up) @ down."""

    def apply(x, weights, up, down, experts):
        x = ops.constrain(x, ("moe_batch", "moe_seq", "embed"))
        rows, offsets, inverse, traffic = ops.dispatch(x, experts, num_experts=E)
        hidden = torch.tanh(ops.grouped_matmul(rows, up, offsets))
        y = ops.combine(ops.grouped_matmul(hidden, down, offsets), inverse, traffic, weights if weighted else None)
        return ops.constrain(y, AXES["x"])

    def both(x, weights, up, down, dy, experts):
        y, pull = torch.func.vjp(lambda *primals: apply(*primals, experts), x, weights, up, down)
        return (y, *pull(dy))

    return both


def expected(args, *, weighted=True):
    """Token by token, slot by slot."""
    x, weights, up, down = (args[name].clone().requires_grad_() for name in ("x", "weights", "up", "down"))
    rows = []
    for token, slots, own in zip(x.view(-1, D), args["experts"].view(-1, K).tolist(), weights.view(-1, K), strict=True):
        pairs = [(e, w if weighted else 1.0) for e, w in zip(slots, own, strict=True) if e >= 0]
        parts = [torch.tanh(token @ up[e]) @ down[e] * w for e, w in pairs]
        rows.append(sum(parts, start=0.0 * token))
    y = torch.stack(rows).view_as(x)
    grads = torch.autograd.grad(y, (x, weights, up, down), args["dy"], allow_unused=True)
    filled = [torch.zeros_like(args[n]) if g is None else g for n, g in zip(("x", "weights", "up", "down"), grads, strict=True)]
    return y.detach(), *filled


def operands(make_tensor, choice: str) -> dict[str, Tensor]:
    return {name: make_tensor(shape, F64) for name, shape in SHAPES.items()} | {"experts": chosen(choice)}


def ranked_graph(function, args, mesh: Mesh, strategy: Strategy) -> RankGraph:
    """The proved graph of a rank, operands and results by the strategy's rows."""
    logical = trace(function, list(args.values()))
    strategy, mesh = arrange(strategy, mesh, {"up": args["up"]}, {"up": AXES["up"]})
    specs = {name: strategy.compute_spec(axes, mesh) for name, axes in AXES.items()}
    ranked = lower(logical, mesh, [specs[name] for name in args], [specs[name] for name in RESULTS], strategy.compute)
    check(ranked)
    return ranked


def assert_exact(ranked, args, **options):
    assert ranked.fallbacks == ()
    names = ("y", "dx", "dweights", "dup", "ddown")
    for name, actual, wanted in zip(names, simulate_graph(ranked, list(args.values())), expected(args, **options), strict=True):
        testing.assert_close(actual, wanted, name=name)


def spread(ep: int, base: str = "ddp", **options) -> Strategy:
    return replace(preset(base), expert_parallel=ep, **options)


GRIDS = {
    "dp2": (Mesh(dp=2), spread(2)),
    "dp4": (Mesh(dp=4), spread(4)),
    "dp8": (Mesh(dp=8), spread(8)),
    "half of dp": (Mesh(dp=4), spread(2)),
    "cp": (Mesh(dp=2, cp=2), spread(2)),
    "dp, cp": (Mesh(dp=4, cp=2), spread(8)),
    "tp of whole tokens": (Mesh(dp=2, tp=2), spread(2, "tp", expert_axes=("tp",))),
    "tp of a shared stream": (Mesh(dp=2, tp=2), spread(2, "tp_sp", expert_axes=("tp",))),
    "dp, tp of whole tokens": (Mesh(dp=2, tp=2), spread(4, "tp")),
    "dp, tp of a shared stream": (Mesh(dp=2, tp=2), spread(4, "tp_sp")),
    "cp, tp": (Mesh(dp=2, cp=2, tp=2), spread(4, "tp", expert_axes=("cp", "tp"))),
    "all": (Mesh(dp=2, cp=2, tp=2), spread(8, "tp_sp")),
    "sharded inside": (Mesh(dp=2, tp=2), spread(2, "tp_sp")),
    "whole inside": (Mesh(dp=2, tp=2), spread(2, "tp_sp", expert_tensor_parallel=False)),
    "fsdp, sharded inside": (Mesh(dp=2, fsdp=2, tp=2), spread(4, "zero3_tp")),
}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("grid", GRIDS)
def test_layer_is_exact(grid, dispatcher, make_tensor):
    """Results and gradients are the loop's wherever the experts are, whatever is chosen: experts without tokens too."""
    mesh, strategy = GRIDS[grid]
    strategy = replace(strategy, dispatcher=dispatcher)
    ranked = ranked_graph(layer(), operands(make_tensor, "any"), mesh, strategy)
    for choice in CHOICES:
        assert_exact(ranked, operands(make_tensor, choice), weighted=True)


@pytest.mark.parametrize("grid", ["dp4", "half of dp", "dp, tp of whole tokens", "sharded inside"])
def test_layer_without_weights_is_exact(grid, make_tensor):
    """Every slot counts 1."""
    mesh, strategy = GRIDS[grid]
    args = operands(make_tensor, "any")
    results = ranked_graph(layer(False), args, mesh, strategy)
    for choice in CHOICES:
        assert_exact(results, operands(make_tensor, choice), weighted=False)


@pytest.mark.parametrize("grid", ["dp4", "half of dp", "dp, cp", "all"])
def test_rows_are_exchanged_twice_each_way(grid, make_tensor):
    """Rows go to their experts and come back, forward and backward; and their numbers go once."""
    ranked = ranked_graph(layer(), operands(make_tensor, "any"), *GRIDS[grid])
    used = collectives_of(ranked)
    wanted = Counter(exchange_rows=4, all_to_all=1)
    counts = Counter(use.op for use in used if use.op in ("exchange_rows", "all_to_all"))
    assert counts == wanted
    (numbers,) = (use for use in used if use.op == "all_to_all")
    assert numbers.bytes == E * 4
    ranks = B * S // ranked.mesh.axis_size(ranked.in_specs[0].axes)
    assert {use.bytes for use in used if use.op == "exchange_rows"} == {ranks * K * D * 8}


def test_experts_that_stay_need_no_exchange(make_tensor):
    """Where every rank has all tokens of its group, none travels: what ranks combine are parts of a sum."""
    for grid, dispatcher in (("tp of whole tokens", "all_to_all"), ("dp4", "all_gather")):
        mesh, strategy = GRIDS[grid]
        ranked = ranked_graph(layer(), operands(make_tensor, "any"), mesh, replace(strategy, dispatcher=dispatcher))
        assert not {use.op for use in collectives_of(ranked)} & {"exchange_rows", "all_to_all"}
