"""`mpar.check` compares a primitive's sharding rule with its implementation: it passes ours, and refuses rules that are wrong."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpar
from mpar import ops
from mpar.errors import ShardingError
from mpar.ops import (
    PRIMITIVES,
    Cost,
    Primitive,
    _constrain,
    _cross_entropy,
    _linear_cross_entropy,
    _linear_divergence,
    primitive_of,
)
from mpar.ops.experts import _rows

PARAMS = {"ignore_index": -100, "vocab_size": 8, "start": 0, "label_smoothing": 0.1}
HYPER = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def draw(*shape, low=None, high=0, seed=0):
    """Normal numbers in float64, or integers from `low` up to `high`; the same for the same shape."""
    generator = torch.Generator().manual_seed(len(shape) + 7 * sum(shape) + seed)
    if low is not None:
        return torch.randint(low, high, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def angles():
    turn = torch.linspace(0.1, 4.0, 8, dtype=torch.float64).view(1, 4, 2)
    return turn.cos(), turn.sin()


def attend(**masks):
    return ops.attention(draw(4, 4, 8, 4), draw(4, 8, 4, 4), draw(4, 8, 4, 4), **masks)


def quantised(x, block):
    q, scale = ops.quantise_fp8(x, block=block)
    product = ops.fp8_matmul(q, scale, q, scale, a_block=block, b_block=block)
    return [*ops.quantise_fp8_both(x, block=block), ops.dequantise_fp8(q, scale, block=block), product]


def slots():
    sizes = {"num_experts": 4, "capacity": 2, "groups": (2, 2)}
    chosen = draw(4, 4, 2, low=0, high=4)
    at = ops.expert_slots(chosen, **sizes)
    rows = ops.fill_slots(draw(4, 4, 4), at, draw(4, 4, 2), **sizes)
    taken = [ops.take_slots(rows, at, draw(4, 4, 2, seed=1)), ops.take_slots(rows, at)]
    return [rows, ops.fill_slots(draw(4, 4, 4), at, **sizes), *taken]


def moved_rows():
    experts = draw(8, 2, low=0, high=4)
    order, _, counts, offsets = ops.expert_order(experts, num_experts=4)
    tokens, rows = draw(8, 4).detach(), draw(16, 4).detach()
    own = {"num_experts": 4, "sizes": [2, 2], "exchanged": [True, False], "mine": 1}
    received = torch.tensor([[3, 4], [4, 5]])
    return [
        _rows.own_experts_p.bind(experts, **own),
        _rows.take_rows_p.bind(tokens, order, offsets, num_rows=int(offsets[-1])),
        _rows.head_rows_p.bind(rows, counts, num_rows=int(counts.sum())),
        _rows.pad_rows_p.bind(tokens, num_rows=12),
        _rows.group_rows_p.bind(rows, received, back=False),
        _rows.group_rows_p.bind(rows, received, back=True),
    ]


def updates():
    lists = lambda seed: [draw(4, 8, seed=seed).detach(), draw(8, seed=seed).detach()]  # noqa: E731
    lr, step, scale = (torch.tensor(value, dtype=torch.float64) for value in (0.1, 2.0, 0.5))
    one = [draw(4, 8, seed=seed).detach() for seed in range(3)]
    return [
        ops.adamw(*one, one[0].square(), lr, step, scale, **HYPER),
        ops.adamw_many(lists(0), lists(1), lists(2), [x.square() for x in lists(3)], lr, step, scale, **HYPER),
        ops.sgd(*one, lr, scale, momentum=0.9),
        ops.sgd_many(lists(0), lists(1), lists(2), lr, scale, momentum=0.9),
    ]


def losses():
    logits, labels, hidden, head = draw(4, 4, 8), draw(4, 4, low=0, high=8), draw(4, 4, 4), draw(4, 8)
    labels[0, 0] = -100
    weights = torch.ones(4, 4, dtype=torch.float64)
    chunked = (hidden.detach(), head.detach(), labels)
    return [
        ops.cross_entropy(logits, labels),
        _cross_entropy.cross_entropy_stats_p.bind(logits.detach(), labels, **PARAMS),
        _cross_entropy.cross_entropy_grad_p.bind(logits.detach().clone(), labels, weights, **PARAMS),
        ops.linear_cross_entropy(hidden, head, labels),
        _linear_cross_entropy.linear_cross_entropy_stats_p.bind(*chunked, **PARAMS, chunk=4),
        _linear_cross_entropy.linear_cross_entropy_grad_p.bind(*chunked, weights, **PARAMS, chunk=4),
        ops.linear_cross_entropy(hidden, head.detach(), labels),
        _linear_cross_entropy.linear_cross_entropy_x_grad_p.bind(*chunked, weights, **PARAMS, chunk=4),
        *divergences(hidden, head, draw(4, 4, 12).detach(), draw(12, 8).detach()),
    ]


def divergences(hidden, head, y, other):
    params = {"beta": 0.3, "temperature": 0.9, "vocab_size": 7, "start": 0, "chunk": 4}
    operands, lse = (hidden.detach(), head.detach(), y, other), draw(2, 4, 4).abs().detach() + 4
    return [
        ops.linear_divergence(hidden, head, y, other, beta=0.3, vocab_size=7, chunk=4),
        ops.linear_divergence(hidden, head, y, other, beta=0.0, temperature=2.0, chunk=4),
        ops.linear_divergence(hidden, head.detach(), y, other, beta=1.0, chunk=4),
        _linear_divergence.linear_divergence_stats_p.bind(*operands, **params),
        _linear_divergence.linear_divergence_terms_p.bind(*operands, *lse, **params),
    ]


def calls():
    """Results of ops whose sizes 4 divides; with their gradients they reach every primitive but those of `WITHIN`."""
    x, key = draw(4, 4, 8), (1, 2)
    experts, logits = draw(8, 2, low=0, high=4), draw(8, 4)
    order = ops.expert_order(experts, num_experts=4)
    documents = torch.tensor([[0, 0, 1, 1]]).repeat(4, 1)
    screen = ops.Screen(torch.zeros(16, 8, dtype=torch.uint8), *torch.zeros(2, 16, dtype=torch.int32))
    scan = [draw(4, 4, 8, 4), draw(4, 4, 8).exp().detach().requires_grad_(), draw(8), draw(4, 4, 4, 4), draw(4, 4, 4, 4, seed=1)]
    return [
        ops.einsum("bsd,df->bsf", x, draw(8, 4)),
        ops.einsum("bsd,bsf->df", x, draw(4, 4, 4)),
        PRIMITIVES["einsum_add"].op(draw(4, 4, 4).detach(), x.detach(), draw(8, 4).detach(), equation="bsd,df->bsf"),
        PRIMITIVES["einsum_add_over"].op(draw(4, 4, 4).detach(), x.detach(), draw(8, 4).detach(), equation="bsd,df->bsf"),
        ops.joined_linear("bsd,dnh->bsnh", x.detach(), [draw(8, 4, 4).detach(), draw(8, 4, 4, seed=1).detach()]),
        ops.largest_logits(x.detach(), draw(16, 8).detach(), screen, torch.zeros(4, 4, dtype=torch.bool)),
        ops.embedding(draw(4, 4, low=0, high=8), draw(8, 4)),
        ops.rms_norm(x, draw(8)),
        ops.rms_norm(x),
        ops.layer_norm(x, draw(8), draw(8, seed=1)),
        ops.add_rms_norm(x, draw(4, 4, 8, seed=1), draw(8)),
        ops.add_layer_norm(x, draw(4, 4, 8, seed=1), draw(8), draw(8, seed=1)),
        ops.rope(draw(4, 4, 4, 4), *angles()),
        ops.rope(draw(4, 4, 4, 4), *angles(), interleaved=True),
        ops.rope_many([draw(4, 4, 4, 4).detach(), draw(4, 4, 8, 4).detach()], *angles()),
        attend(),
        attend(window=2, k_documents=draw(4, 8, low=0, high=1), q_documents=draw(4, 4, low=0, high=1)),
        attend(sinks=draw(8), soft_cap=3.0),
        ops.attention(draw(4, 4, 8, 4), draw(4, 4, 2, 4), draw(4, 4, 2, 4, seed=1)),
        ops.merge_attention(draw(4, 4, 4, 4), draw(4, 4, 4), draw(4, 4, 4, 4, seed=1), draw(4, 4, 4, seed=1)),
        ops.ssd_scan(*scan, chunk=2),
        ops.ssd_scan(*scan[:3], *(x[:, :, :2] for x in scan[3:]), draw(8, seed=1), documents_BS=documents, chunk=4),
        ops.causal_conv1d(x, draw(8, 4)),
        ops.causal_conv1d(x, draw(8, 4), draw(8), state_BTC=draw(4, 3, 8), documents_BS=documents),
        *cached(),
        ops.swiglu(x, draw(4, 4, 8, seed=1)),
        ops.geglu(x, draw(4, 4, 8, seed=1)),
        ops.mlp_tiled(x, draw(8, 4), draw(8, 4, seed=1), draw(4, 8), activation="gelu", chunk=4),
        ops.mlp_tiled(x, None, draw(8, 4), draw(4, 8), chunk=4),
        ops.mlp_tiled(x, *(draw(*shape).detach() for shape in ((8, 4), (8, 4), (4, 8))), chunk=4),
        ops.widen(draw(4, 8).float(), torch.float64),
        *losses(),
        ops.random_uniform(key, (4, 8)),
        ops.random_normal(key, (4, 8), starts=(1, 3)),
        ops.dropout(x, 0.5, ops.fold_key(0)),
        ops.dequantise_nf4(ops.quantise_nf4(draw(4, 256).detach()), dtype=torch.float64),
        ops.dequantise_nf4(ops.quantise_nf4(draw(4, 8, 256).detach()), dtype=torch.float64),
        ops.dequantise_int8(ops.quantise_int8(draw(4, 4, 8).detach()), dtype=torch.float64),
        ops.token_dropout(x, 0.5, draw(4, 4, low=0, high=99), torch.tensor(3), "a"),
        ops.token_dropout(draw(4, 4, 8), 0.5, draw(4, low=0, high=99), torch.tensor(3), "a"),
        ops.fold_in(key, 3),
        ops.sum_squares(x),
        ops.newton_schulz(x.detach(), narrow=False),
        ops.eigenbasis(draw(4, 8, 8).detach(), draw(4, 8, 8, seed=1).detach(), torch.tensor(4.0, dtype=torch.float64), every=1),
        *updates(),
        _constrain.constrain_p.bind(x.detach(), axes="names:,,", mark=0),
        _constrain.name_p.bind(x, label="a"),
        ops.topk_router(logits, draw(4), k=2),
        ops.topk_router(logits, k=2, score="sigmoid", order="post", groups=2, groups_kept=1),
        ops.expert_counts(experts, num_experts=4),
        ops.group_counts(experts.view(4, 2, 2), num_experts=4, groups=(2, 2)),
        ops.limit_capacity(experts.view(4, 2, 2), draw(4, 2, 2).detach(), torch.arange(2), num_experts=4, capacity=1),
        ops.limit_capacity(experts.view(4, 2, 2), draw(4, 2, 2).detach(), num_experts=4, capacity=1, groups=(2, 2)),
        ops.sinkhorn(draw(4, 4, 4).detach(), groups=(2, 2)),
        order,
        ops.permute(draw(8, 4), order[1]),
        ops.unpermute(draw(16, 4), order[1], draw(8, 2)),
        ops.unpermute(draw(16, 4), order[1]),
        *slots(),
        *moved_rows(),
        ops.grouped_matmul(draw(16, 4), draw(4, 4, 8), torch.tensor([3, 4, 9, 16])),
        *(quantised(draw(4, 256).detach().float(), block) for block in ("tensor", "row", "1x128")),
        quantised(draw(256, 256).detach().float(), "128x128"),
    ]


def cached():
    """A step of inference: four tokens of two rows in each group, of which the second goes on from a cache."""
    pool, new = draw(4, 16, 4, 4).detach(), draw(4, 4, 4, 4).detach()
    rows, order = torch.tensor([[0, 0, 0, 1]]).expand(4, 4), torch.tensor([[0, 1, 2, 5]]).expand(4, 4)
    places = torch.tensor([[4, 5, 6, 13]]).expand(4, 4)
    pages = torch.tensor([[[1, 0], [2, 3]]]).expand(4, 2, 2)
    scanned = [(4, 4, 8, 4), (4, 4, 8), (8,), (4, 4, 4, 4), (4, 4, 4, 4), (8,), (4, 2, 8, 4, 4)]
    scanned = [draw(*shape, seed=i).detach() for i, shape in enumerate(scanned)]
    few = [x[:, :, :2] if i in (3, 4) else x for i, x in enumerate(scanned)]
    return [
        ops.write_rows(pool, new, places),
        PRIMITIVES["write_rows_over"].bind(pool.clone(), new, places, shard=False),
        ops.overwrite(new.clone(), new),
        *ops.conv_by_rows(*(draw(*shape).detach() for shape in ((4, 4, 8), (8, 4), (8,), (4, 2, 3, 8))), rows, order),
        *ops.scan_by_rows(*scanned, rows, order, chunk=2),
        *ops.scan_by_rows(*few, rows, order, chunk=2),
        ops.paged_attention(draw(4, 4, 8, 4).detach(), pool, pool, rows, order, pages, page_size=4, sinks=draw(8).detach()),
        ops.paged_attention(draw(4, 4, 8, 4).detach(), pool, pool, rows, order, pages, page_size=4, window=2, soft_cap=3.0),
        ops.paged_attention(draw(4, 4, 8, 4).detach(), *[pool[:, :, :2]] * 2, rows, order, pages, page_size=4),
    ]


def layer_of_experts(x, experts, weights, w):
    """What an expert makes of each token, added up: dispatch, products and combine have a meaning together."""
    rows, offsets, inverse, traffic = ops.dispatch(x, experts, num_experts=4)
    return ops.combine(ops.grouped_matmul(rows, w, offsets), inverse, traffic, weights)


def gradients_of_experts(x, experts, weights, w):
    loss = lambda x, weights, w: layer_of_experts(x, experts, weights, w).square().sum()  # noqa: E731
    return torch.func.grad(loss, argnums=(0, 1, 2))(x, weights, w)


def gradient_of_a_mark(x):
    return torch.func.grad(lambda x: ops.constrain(x, mpar.P("a")).sin().sum())(x)


LAYER = (draw(4, 4, 8).detach(), draw(4, 4, 2, low=0, high=4), draw(4, 4, 2).detach(), draw(4, 8, 4).detach())
WITHIN = {
    "dispatch": (layer_of_experts, LAYER),
    "combine": (layer_of_experts, LAYER),
    "combine_bwd": (gradients_of_experts, LAYER),
    "grouped_matmul": (layer_of_experts, LAYER),
    "grouped_matmul_dw": (gradients_of_experts, LAYER),
    "constrain_bwd": (gradient_of_a_mark, (draw(4, 8).detach(),)),
}
"""Ops that speak of a rank's own part: a function in which they have a meaning."""
NEVER_SHARDED = {"adamw_many", "sgd_many"}
"""Ops of lists that the compiler makes of ops which it has placed before: tests/ops/test_updates.py compares them with these."""


class Record(TorchDispatchMode):
    """Keeps the operands and parameters of the calls of every primitive, one of each kind."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        primitive = primitive_of(func)
        if primitive is not None:
            copies = torch.utils._pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, args)
            kind = (str([x.shape if isinstance(x, torch.Tensor) else x for x in args if not isinstance(x, list)]), str(kwargs))
            self.calls.setdefault(primitive.name, {}).setdefault(kind, (copies, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def examples():
    """For every primitive that `calls` and their gradients reach: lists of operands and parameters."""
    with Record() as record:
        for result in torch.utils._pytree.tree_leaves(calls()):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.square().sum().backward(retain_graph=True)
    return {name: list(kinds.values()) for name, kinds in record.calls.items()}


def test_examples_reach_every_primitive(examples):
    """A new primitive without an example fails here."""
    assert set(examples) | set(WITHIN) == set(PRIMITIVES)


@pytest.mark.parametrize("name", sorted(set(PRIMITIVES) - NEVER_SHARDED))
def test_rules_of_our_primitives_hold(name, examples):
    """Whichever factor is sharded, ranks compute what one rank computes; and what may be sharded was, on a mesh."""
    primitive = PRIMITIVES[name]
    tried = set()
    for operands, params in examples.get(name, ()) if name not in WITHIN else ():
        tried |= set(mpar.check(primitive, operands, params))
    for table in ({}, {"expert": ("a",)}) if name in WITHIN else ():
        fn, operands = WITHIN[name]
        assert mpar.check(primitive, operands, within=fn, table=table)
    for _, params in examples[name] if name not in WITHIN else ():
        rule = primitive.sharding_rule(**params)
        factors = {factor for dims in (*rule.operands, *rule.results) for names in dims for factor in names}
        assert factors - {"..."} <= tried | rule.need_replication, params


def test_refuses_what_it_cannot_check(examples):
    """An op with several lists of results, and a function that does not call the op."""
    with pytest.raises(ShardingError, match=r"'adamw_many'.*several lists"):
        mpar.check(PRIMITIVES["adamw_many"], *examples["adamw_many"][0])
    with pytest.raises(ShardingError, match=r"'rope'.*does not call it"):
        mpar.check(PRIMITIVES["rope"], (draw(4, 8).detach(),), within=torch.sin)


def _primitive(name, signature, impl, rule, **extras):
    primitive = PRIMITIVES.get(name) or Primitive(name, signature)
    primitive.def_abstract(lambda x: impl(x.new_empty(x.shape)))
    primitive.impl = impl
    primitive.def_sharding(rule, **extras)
    primitive.def_cost(lambda x: Cost(0, 0))
    return primitive


@pytest.fixture
def plant():
    """Makes a primitive for one test."""
    made = []

    def make(*args, **extras):
        made.append(_primitive(*args, **extras))
        return made[-1]

    yield make
    for primitive in made:
        PRIMITIVES.pop(primitive.name, None)


WRONG = {
    "flip": (lambda x: x.flip(-1), "... v -> ... v", {}),
    "mean as a sum": (lambda x: x.mean(-1), "... v -> ...", {}),
    "softmax": (lambda x: x.softmax(-1), "... v -> ... v", {}),
    "relu of a pending sum": (lambda x: x.relu(), "... v -> ... v", {"linear": "x"}),
    "running sum": (lambda x: x.cumsum(-1), "... v -> ... v", {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_a_wrong_rule(name, plant):
    """The error names the primitive, how it was sharded, the mesh, and the first result that differs."""
    impl, rule, extras = WRONG[name]
    planted = plant(f"planted_{name.replace(' ', '_')}", "x -> y", impl, rule, **extras)
    how = "operand 0 a pending sum over a" if extras else "factor 'v' sharded by a"
    with pytest.raises(ShardingError, match=f"{planted.name}(.|\n)*{how}(.|\n)*result 'y'(.|\n)*mesh: Mesh") as error:
        mpar.check(planted, (draw(4, 8).detach(),))
    assert "(4, 8) by P(" in str(error.value)


def test_accepts_the_same_ops_with_right_rules(plant):
    """A dim that is worked across is gathered; then all is well, and the other dim was sharded."""
    for name, (impl, rule, _) in WRONG.items():
        right = plant(f"right_{name.replace(' ', '_')}", "x -> y", impl, rule, need_replication="v")
        assert mpar.check(right, (draw(4, 8).detach(),)) == ("leading0", "v")
