"""Attention of a sequence that ranks share, by every method, against softmax over all pairs in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpar import Mesh, ops, testing
from mpar.arrange import CONTEXT_PARALLEL, arrange, sequence_order
from mpar.ops.sequence._attention import attention_p
from mpar.sharding import RankGraph, check, collectives, collectives_of, lower, simulate_graph, trace
from mpar.strategy import Strategy, preset

F64 = torch.float64
B, S, N = 2, 32, 8
Q, KV = ("batch", "attend_seq", "attend_heads", "head"), ("batch", "attend_kv_seq", "attend_kv_heads", "head")
AXES = {
    "q": ("batch", "seq", "heads", "head"),
    "k": ("batch", "seq", "kv_heads", "head"),
    "v": ("batch", "seq", "kv_heads", "head"),
    "sinks": ("heads",),
    "order": ("seq",),
    "documents": ("batch", "seq"),
    "dout": ("batch", "seq", "heads", "head"),
    "dlse": ("batch", "seq", "heads"),
}
RESULTS = ("dout", "dlse", "q", "k", "v", "sinks")
CASES = {
    "causal": {},
    "full": {"causal": False},
    "packed": {"packed": True},
    "window": {"window": 5},
    "packed window sinks": {"packed": True, "window": 7, "sinks": True},
    "capped sinks": {"soft_cap": 0.7, "sinks": True},
    "one kv head": {"kv_heads": 1},
    "latent packed": {"kv_heads": N, "sizes": (24, 16), "packed": True},  # MLA: every head has keys, of another size than values
}


def formula(q, k, v, sinks, order, documents, *, causal=True, window=None, soft_cap=None):
    """Softmax over all pairs at once; the sink is a column without value. `(out, lse)`, zero where nothing is seen."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    distance = order[:, None] - order[None, :]
    hidden = (distance < 0) if causal else torch.zeros(S, S, dtype=torch.bool)
    hidden = (hidden | (distance >= window) if window else hidden).expand(B, S, S)
    if documents is not None:
        same = (documents[:, :, None] == documents[:, None, :]) & (documents[:, None, :] >= 0)
        hidden = hidden | ~same
    scores = torch.einsum("bsnh,bmnh->bsnm", q, k) / math.sqrt(q.shape[3])
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    weights = torch.exp(scores) * ~hidden[:, :, None]
    total = weights.sum(-1) + (0 if sinks is None else torch.exp(sinks))
    blind = total == 0
    return torch.einsum("bsnm,bmnh->bsnh", weights / (total + blind)[..., None], v), torch.log(total + blind)


def function(*, packed=False, sinks=False, **masks):
    """What a model does around attention, and its gradients; lse is zero where nothing is seen."""

    def attend(q, k, v, scores, order, documents):
        q, k, v = ops.constrain(q, Q), ops.constrain(k, KV), ops.constrain(v, KV)
        packs = {"q_documents": documents, "k_documents": documents} if packed else {}
        out, lse = ops.attention(
            q, k, v, q_order=order, k_order=order, sinks=scores if sinks else None, soft_cap=masks.get("soft_cap"),
            window=masks.get("window"), causal=masks.get("causal", True), **packs,
        )  # fmt: skip
        lse = torch.where(torch.isinf(lse), 0.0, lse)
        return ops.constrain(out, AXES["dout"]), ops.constrain(lse, AXES["dlse"])

    def both(q, k, v, scores, order, documents, dout, dlse):
        results, pull = torch.func.vjp(lambda *x: attend(*x, order, documents), q, k, v, scores)
        return (*results, *pull((dout, dlse)))

    return both


def operands(make_tensor, num_parts, *, kv_heads=4, sizes=(4, 4), **_) -> dict[str, Tensor]:
    """Global operands, dealt out in `num_parts`; documents of several lengths, one of them padding."""
    H, V = sizes
    shapes = {"q": (B, S, N, H), "k": (B, S, kv_heads, H), "v": (B, S, kv_heads, V), "sinks": (N,)}
    shapes |= {"dout": (B, S, N, V), "dlse": (B, S, N)}
    found = {name: make_tensor(shape, F64) for name, shape in shapes.items()}
    found["order"] = sequence_order(S, num_parts)
    ends = torch.tensor([[3, 4, 20, 27], [16, 17, 32, 32]])
    documents = (torch.arange(S) >= ends[..., None]).sum(1)
    found["documents"] = documents.masked_fill(documents == 4, -1)[:, found["order"]]
    return {name: found[name] for name in AXES}


def ranked_graph(function, args: dict[str, Tensor], mesh: Mesh, strategy: Strategy) -> RankGraph:
    """The proved graph of a rank, operands and results by the strategy's rows."""
    logical = trace(function, list(args.values()))
    heads = {"q": args["q"][0, 0, :, 0], "k": args["k"][0, 0, :, 0]}
    strategy, mesh = arrange(strategy, mesh, heads, {"q": ("heads",), "k": ("kv_heads",)})
    specs = [strategy.compute_spec(AXES[name], mesh) for name in args]
    results = RESULTS[: len(logical.results)]
    out_specs = [strategy.compute_spec(AXES[name], mesh) for name in results]
    ranked = lower(logical, mesh, specs, out_specs, strategy.compute)
    check(ranked)
    return ranked


def by_method(method: str, base: str = "ddp") -> Strategy:
    return replace(preset(base), context_parallel=method)


def expected(args, *, packed=False, sinks=False, **masks):
    q, k, v, scores, order, documents, dout, dlse = args.values()
    primals = [x.clone().requires_grad_() for x in (q, k, v, scores)]
    masks = {name: value for name, value in masks.items() if name in ("causal", "window", "soft_cap")}
    out, lse = formula(*primals[:3], primals[3] if sinks else None, order, documents if packed else None, **masks)
    grads = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), primals, allow_unused=True)
    return out.detach(), lse.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(primals, grads, strict=True))


def assert_exact(ranked, args, options):
    assert ranked.fallbacks == ()
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, actual, wanted in zip(names, simulate_graph(ranked, list(args.values())), expected(args, **options), strict=True):
        testing.assert_close(actual, wanted, name=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_attention_is_exact(cp, method, case, make_tensor):
    """Results and gradients of every method are softmax over all pairs, kv heads fewer than ranks too, in zigzag."""
    options = CASES[case]
    args = operands(make_tensor, 2 * cp, **options)
    assert_exact(ranked_graph(function(**options), args, Mesh(cp=cp), by_method(method)), args, options)


@pytest.mark.parametrize("case", ["causal", "packed window sinks", "latent packed"])
@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
def test_attention_on_a_grid_is_exact(method, case, make_tensor):
    """The same where other axes shard the batch and the heads."""
    options = CASES[case]
    args = operands(make_tensor, 4, **options)
    assert_exact(ranked_graph(function(**options), args, Mesh(dp=2, cp=2, tp=2), by_method(method, "tp_sp")), args, options)


@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
def test_any_order_is_exact(method, make_tensor):
    """A permutation without runs, and orders that are not given, are only other masks."""
    for order in (torch.randperm(S, generator=torch.Generator().manual_seed(0)), torch.arange(S)):
        args = operands(make_tensor, 1) | {"order": order}
        assert_exact(ranked_graph(function(window=9), args, Mesh(cp=4), by_method(method)), args, {"window": 9})


def test_orders_that_are_not_given_count_from_where_a_rank_begins(make_tensor):
    """Without orders, contiguous shards of a ring know their places."""
    args = operands(make_tensor, 1)

    def attend(q, k, v, *_):
        q, k, v = ops.constrain(q, Q), ops.constrain(k, KV), ops.constrain(v, KV)
        return ops.attention(q, k, v, window=6)[0]

    out, *_ = simulate_graph(ranked_graph(attend, args, Mesh(cp=4), by_method("ring")), list(args.values()))
    testing.assert_close(out, expected(args, window=6)[0])


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_ring_moves_the_fewest_blocks(cp, packed, make_tensor):
    """Forward cp - 1 blocks of keys, values, orders and documents; backward as many, and as many of gradients. Nothing else."""
    args = operands(make_tensor, 2 * cp)
    ranked = ranked_graph(function(packed=packed), args, Mesh(cp=cp), by_method("ring"))
    keys = (args["k"].nbytes + args["v"].nbytes) // cp
    block = keys + S // cp * 8 + (B * S // cp * 8 if packed else 0)
    used = [(use.op, use.bytes) for use in collectives_of(ranked)]
    forward, backward = used[: cp - 1], used[cp - 1 :]
    assert forward == [("shift", block)] * (cp - 1)
    assert sorted(backward) == sorted([("shift", block), ("shift", keys)] * (cp - 1))


def overlaps(ranked: RankGraph) -> list[tuple[str, str]]:
    """For each message of a ring, in order: what is sent, and the attention between its post and its arrival."""
    calls = list(ranked.graph.find_nodes(op="call_function", target=collectives.shift, sort=True))
    place = {node: line for line, node in enumerate(ranked.graph.nodes)}
    kinds = {attention_p.op: "forward", attention_p.bwd.op: "backward"}
    found = []
    for post in calls:
        (arrival,) = (node for node in post.users if node.target is collectives.arrived)
        assert list(arrival.args[1]) == list(post.args[0])  # what is sent stays alive until then
        within = [node for node in ranked.graph.nodes if node.target in kinds and place[post] < place[node] < place[arrival]]
        own = [node for node in within if post.args[0][0] in node.args]
        what = "block" if any(post.args[0][0] in node.args for node in place if node.target in kinds) else "gradients"
        found.append((what, " ".join(kinds[node.target] for node in (own if what == "block" else within))))
    return found


def test_ring_posts_before_it_attends(make_tensor):
    """A block is on its way while the same block is attended to, and gradients while the next one is, but for the last."""
    found = overlaps(ranked_graph(function(), operands(make_tensor, 8), Mesh(cp=4), by_method("ring")))
    assert found[:3] == [("block", "forward")] * 3
    assert [pair for pair in found[3:] if pair[0] == "block"] == [("block", "backward")] * 3
    assert [pair for pair in found[3:] if pair[0] != "block"] == [("gradients", "backward")] * 2 + [("gradients", "")]


@pytest.mark.parametrize("method", ["all_to_all", "all_gather"])
def test_other_methods_move_the_fewest_tensors(method, make_tensor):
    """Ulysses: queries, keys, values and results, forward and backward. Gathered: keys and values, and their gradients."""

    def attend(q, k, v):
        q, k, v = ops.constrain(q, Q), ops.constrain(k, KV), ops.constrain(v, KV)
        out, _ = ops.attention(q, k, v)
        return ops.constrain(out, AXES["dout"])

    def both(q, k, v, scores, order, documents, dout, dlse):
        out, pull = torch.func.vjp(attend, q, k, v)
        return (out, dlse, *pull(dout))

    args = operands(make_tensor, 1)
    used = [(use.op, use.bytes) for use in collectives_of(ranked_graph(both, args, Mesh(cp=4), by_method(method)))]
    q, k = args["q"].nbytes // 4, args["k"].nbytes // 4
    by_heads = [("all_to_all", size) for size in (q, k, k, q)]
    whole = [("all_gather", k), ("all_gather", k), ("reduce_scatter", 4 * k), ("reduce_scatter", 4 * k)]
    expected_uses = whole if method == "all_gather" else [*by_heads, *by_heads]
    assert sorted(used) == sorted(expected_uses)
