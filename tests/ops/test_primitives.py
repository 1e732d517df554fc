"""A walk over all primitives: every rule is there, and abstract results are what the implementation gives."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpar import ops
from mpar.ops import _constrain, _cross_entropy, _linear_cross_entropy, _linear_divergence, _widen
from mpar.ops.experts import _rows
from mpar.ops.primitive import PRIMITIVES, primitive_of
from mpar.torch_private import make_fx

LABELS, IDS = torch.tensor([[0, 3, -100], [2, 6, 1]]), torch.tensor([[0, 4, 4], [1, 0, 4]])
EXPERTS, INVERSE = torch.tensor([[0, 2], [1, 2], [-1, 0], [0, 1]]), torch.tensor([[0, 5], [3, 6], [7, 1], [2, 4]])
HYPER = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _quantised(x: Tensor, block: str) -> list[Tensor]:
    q, scale = ops.quantise_fp8(x, block=block)
    product = ops.fp8_matmul(q, scale, q, scale, a_block=block, b_block=block)
    return [*ops.quantise_fp8_both(x, block=block), ops.dequantise_fp8(q, scale, block=block), product]


def _dispatched(x) -> list[Tensor]:
    rows, *where = ops.dispatch(x(2, 2, 6), EXPERTS.view(2, 2, 2), num_experts=3)
    inverse, traffic = where[1:]
    return [rows, *where, ops.combine(rows, inverse, traffic, x(2, 2, 2)), ops.combine(x(8, 6), inverse, traffic)]


def _slots(x) -> list[Tensor]:
    sizes = {"num_experts": 3, "capacity": 2, "groups": (2, 1)}
    slots = ops.expert_slots(EXPERTS.view(2, 2, 2), **sizes)
    rows = ops.fill_slots(x(2, 2, 6), slots, **sizes)
    return [slots, rows, ops.take_slots(rows, slots, x(2, 2, 2)), ops.take_slots(x(3, 2, 1, 2, 6), slots)]


def _moved_rows(x) -> list[Tensor]:
    """Abstract rules speak of the rows that there are when loads are even: so many there are here."""
    order, _, counts, offsets = ops.expert_order(EXPERTS, num_experts=3)
    tokens, rows = x(4, 6).detach(), x(8, 6).detach()
    own = {"num_experts": 4, "sizes": [2, 2], "exchanged": [True, False], "mine": 1}
    return [
        _rows.own_experts_p.bind(EXPERTS, **own),
        _rows.take_rows_p.bind(tokens, order, offsets, num_rows=int(offsets[-1])),
        _rows.head_rows_p.bind(rows, counts, num_rows=int(counts.sum())),
        _rows.pad_rows_p.bind(tokens, num_rows=7),
        _rows.group_rows_p.bind(rows, torch.tensor([[1, 2], [3, 2]]), back=False),
        _rows.group_rows_p.bind(rows, torch.tensor([[1, 2], [3, 2]]), back=True),
    ]


def _divergences(x) -> list[Tensor]:
    hidden, head, y, other = x(2, 3, 4), x(4, 7), x(2, 3, 5).detach(), x(5, 7).detach()
    params = {"beta": 0.3, "temperature": 0.9, "vocab_size": 6, "start": 0, "chunk": 4}
    operands = (hidden.detach(), head.detach(), y, other)
    lse = torch.zeros(2, 3, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return [
        ops.linear_divergence(hidden, head, y, other, beta=0.3, chunk=4)[0],
        ops.linear_divergence(hidden, head.detach(), y, other, beta=1.0, chunk=4)[0],
        *_linear_divergence.linear_divergence_stats_p.bind(*operands, **params),
        *_linear_divergence.linear_divergence_terms_p.bind(*operands, lse, lse, **params),
    ]


def _calls(x):
    """A call of every op, on operands made by `x(*shape)`; together they reach every primitive."""
    half, table = torch.rand(1, 3, 2), x(5, 4)
    masks = {"q_order": torch.arange(3), "k_documents": torch.zeros(2, 5).long(), "q_documents": torch.zeros(2, 3).long()}
    lists = lambda: [x(2, 3).detach(), x(5).detach()]  # noqa: E731
    constrained = _constrain.constrain_p.bind(x(2, 3), axes="names:batch,embed", mark=0)
    params = {"ignore_index": -100, "vocab_size": 7, "start": 0, "label_smoothing": 0.1}
    hidden, head = x(2, 3, 4), x(4, 7)
    sum_of = [x(*shape).detach() for shape in ((2, 3, 5), (2, 3, 4), (4, 5))]
    return [
        ops.einsum("bsd,df->bsf", x(2, 3, 4), x(4, 5)),
        *(PRIMITIVES[name].op(*sum_of, equation="bsd,df->bsf") for name in ("einsum_add", "einsum_add_over")),
        ops.einsum("bsd,bsf->df", x(2, 3, 4).transpose(0, 1).contiguous().transpose(0, 1), x(2, 3, 5)),
        ops.einsum("bsd,d->dbs", x(2, 3, 4), x(4)),
        ops.einsum("bse,f->fs", x(2, 3, 4), x(5)),
        ops.joined_linear("bsd,dnh->bsnh", x(2, 3, 4).detach(), [x(4, 2, 3).detach(), x(4, 1, 3).detach()]),
        ops.embedding(IDS, table),
        ops.rms_norm(x(2, 3, 4), x(4)),
        ops.rms_norm(x(2, 3, 4)),
        ops.layer_norm(x(2, 3, 4), x(4), x(4)),
        ops.layer_norm(x(2, 3, 4), None, x(4)),
        *ops.add_rms_norm(x(2, 3, 4), x(2, 3, 4), x(4)),
        *ops.add_layer_norm(x(2, 3, 4), x(2, 3, 4), x(4), x(4)),
        ops.rope(x(2, 3, 2, 6), half.cos(), half.sin()),
        ops.rope(x(2, 3, 2, 6).transpose(1, 2).contiguous().transpose(1, 2), half.cos(), half.sin(), interleaved=True),
        *ops.rope_many([x(2, 3, 2, 6).detach(), x(2, 3, 4, 8).detach()], half.cos(), half.sin()),
        *ops.attention(x(2, 3, 4, 6), x(2, 5, 2, 6), x(2, 5, 2, 6)),
        *ops.attention(x(2, 3, 4, 6), x(2, 5, 2, 6), x(2, 5, 2, 3), **masks, window=2),
        *ops.attention(x(2, 3, 4, 6), x(2, 5, 2, 6), x(2, 5, 2, 6), sinks=x(4), soft_cap=3.0),
        *_paged(x),
        *ops.merge_attention(x(2, 3, 4, 6), x(2, 3, 4).float(), x(2, 3, 4, 6), x(2, 3, 4).float()),
        *ops.ssd_scan(x(2, 5, 4, 3), x(2, 5, 4), x(4), x(2, 5, 2, 6), x(2, 5, 2, 6), chunk=2),
        *ops.ssd_scan(x(2, 3, 2, 3), x(2, 3, 2), x(2), x(2, 3, 1, 6), x(2, 3, 1, 6), x(2), state_BNHK=x(2, 2, 3, 6)),
        ops.causal_conv1d(x(2, 3, 6), x(6, 4)),
        ops.causal_conv1d(x(2, 3, 6), x(6, 4), x(6), state_BTC=x(2, 3, 6), documents_BS=torch.zeros(2, 3).long()),
        ops.swiglu(x(2, 3), x(3, 2).T),
        ops.geglu(x(2, 3), x(3, 2).T),
        ops.mlp_tiled(x(2, 3, 4), x(4, 6), x(4, 6), x(6, 4), activation="gelu", chunk=4),
        ops.mlp_tiled(x(3, 4), None, x(4, 6), x(6, 4), chunk=4),
        ops.mlp_tiled(x(3, 4), *(x(*shape).detach() for shape in ((4, 6), (4, 6), (6, 4))), chunk=4),
        _widen.widen_p.bind(x(2, 3), dtype=torch.float64),
        ops.cross_entropy(x(2, 3, 7), LABELS)[0],
        *_cross_entropy.cross_entropy_stats_p.bind(x(2, 3, 7).detach(), LABELS, **params),
        *_cross_entropy.cross_entropy_grad_p.bind(x(2, 3, 7).detach(), LABELS, torch.ones(2, 3), **params),
        ops.linear_cross_entropy(hidden, head, LABELS)[0],
        *_linear_cross_entropy.linear_cross_entropy_stats_p.bind(hidden.detach(), head.detach(), LABELS, **params, chunk=4),
        *_linear_cross_entropy.linear_cross_entropy_grad_p.bind(
            hidden.detach(), head.detach(), LABELS, torch.ones(2, 3), **params, chunk=4
        ),
        ops.linear_cross_entropy(hidden, head.detach(), LABELS)[0],
        *_linear_cross_entropy.linear_cross_entropy_x_grad_p.bind(
            hidden.detach(), head.detach(), LABELS, torch.ones(2, 3), **params, chunk=4
        ),
        *_divergences(x),
        ops.random_uniform((1, 2), (3, 5)),
        ops.random_normal((1, 2), (3, 5), starts=(1, 3)),
        ops.dropout(x(2, 3), 0.5, ops.fold_key(0)),
        ops.dequantise_nf4(ops.quantise_nf4(x(2, 64).detach())),
        ops.dequantise_int8(ops.quantise_int8(x(2, 3).detach())),
        ops.token_dropout(x(2, 3), 0.5, torch.arange(2), torch.tensor(1), "a"),
        ops.fold_in((1, 2), 3),
        ops.sum_squares(x(2, 3)),
        ops.newton_schulz(x(3, 2, 3, 4).detach(), rows=2),
        ops.newton_schulz(x(4, 2).detach(), narrow=False),
        ops.eigenbasis(x(3, 2, 2).detach(), x(3, 2, 2).detach(), _number(3), every=1),
        *ops.adamw(*(x(2, 3).detach() for _ in range(4)), _number(0.1), _number(1), _number(1), **HYPER),
        *ops.adamw_many(lists(), lists(), lists(), lists(), _number(0.1), _number(1), _number(1), **HYPER),
        *ops.sgd(*(x(2, 3).detach() for _ in range(3)), _number(0.1), _number(1), momentum=0.9),
        *ops.sgd_many(lists(), lists(), lists(), _number(0.1), _number(1), momentum=0.9),
        constrained,
        _constrain.name_p.bind(x(2, 3), label="a"),
        *ops.topk_router(x(5, 6), x(6), k=2),
        *ops.topk_router(x(5, 6), k=3, score="sigmoid", order="post", groups=3, groups_kept=2),
        ops.expert_counts(EXPERTS, num_experts=3),
        ops.group_counts(EXPERTS.view(2, 2, 2), num_experts=3, groups=(2, 1)),
        ops.limit_capacity(EXPERTS.view(2, 2, 2), x(2, 2, 2), torch.arange(2), num_experts=3, capacity=1),
        ops.sinkhorn(x(2, 3, 4).detach()),
        *ops.expert_order(EXPERTS, num_experts=3),
        ops.permute(x(4, 6), INVERSE),
        ops.unpermute(x(8, 6), INVERSE, x(4, 2)),
        ops.unpermute(x(8, 6), INVERSE),
        *_dispatched(x),
        *_slots(x),
        *_moved_rows(x),
        ops.grouped_matmul(x(8, 6), x(3, 5, 6).transpose(1, 2), torch.tensor([2, 2, 7])),
        *(y for block in ("tensor", "row", "1x128", "128x128") for y in _quantised(x(3, 5).detach(), block)),
    ]


SCAN = ((1, 3, 4, 3), (1, 3, 4), (4,), (1, 3, 2, 6), (1, 3, 2, 6), (4,), (1, 2, 4, 3, 6))


def _paged(x):
    """A step that writes the keys of three tokens, attends to them, and asks for logits."""
    pool, rows, places = x(1, 8, 2, 6).detach(), x(1, 3, 2, 6).detach(), torch.tensor([[2, 3, 4]])
    where = torch.zeros(1, 3).long(), torch.arange(3)[None], torch.ones(1, 1, 2).long()
    screen = ops.Screen(torch.zeros(5, 4, dtype=torch.uint8), *torch.zeros(2, 5, dtype=torch.int32))
    return [
        ops.write_rows(pool, rows, places),
        PRIMITIVES["write_rows_over"].bind(pool.clone(), rows, places, shard=False),
        ops.overwrite(rows.clone(), rows),
        *ops.conv_by_rows(*(x(*shape).detach() for shape in ((1, 3, 6), (6, 4), (6,), (1, 2, 3, 6))), *where[:2]),
        *ops.scan_by_rows(*(x(*shape).detach() for shape in SCAN), *where[:2], chunk=2),
        ops.paged_attention(x(1, 3, 4, 6).detach(), pool, pool, *where, page_size=4, sinks=x(4).detach()),
        ops.largest_logits(x(1, 3, 4).detach(), x(5, 4).detach(), screen, torch.zeros(1, 3, dtype=torch.bool)),
    ]


class _CompareWithAbstract(TorchDispatchMode):
    """Runs the abstract rule next to every call of a primitive and compares shapes, dtypes and strides."""

    def __init__(self):
        super().__init__()
        self.seen, self.problems = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        primitive = primitive_of(func)
        if primitive is not None:
            self.seen.add(primitive.name)
            expected = primitive.abstract(*torch.utils._pytree.tree_map(_meta, args), **kwargs)
            got = [_look(t) for t in torch.utils._pytree.tree_leaves(out)]
            wanted = [_look(t) for t in torch.utils._pytree.tree_leaves(expected)]
            if got != wanted:
                self.problems.append(f"{primitive.name}: gives {got}, its abstract rule says {wanted}")
            cost = primitive.cost(*args, **kwargs)
            if not all(isinstance(n, int) and n >= 0 for n in (cost.flops, cost.bytes, cost.workspace)):
                self.problems.append(f"{primitive.name}: costs {cost}")
        return out


class _CompareWithTrace(TorchDispatchMode):
    """Traces the implementation of every primitive that is not opaque, and compares what the trace computes."""

    def __init__(self):
        super().__init__()
        self.problems, self.calls = {}, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        primitive = primitive_of(func)
        if primitive is not None and not primitive.opaque and not primitive.asks_host and self.calls[primitive.name] < 2:
            self.calls[primitive.name] += 1  # the second call shows whether the first trace has left something
            flat, structure = torch.utils._pytree.tree_flatten(args)
            places = [place for place, x in enumerate(flat) if isinstance(x, Tensor)]

            def implementation(*tensors):
                given = dict(zip(places, tensors, strict=True))
                operands = torch.utils._pytree.tree_unflatten([given.get(i, x) for i, x in enumerate(flat)], structure)
                return primitive.impl(*operands, **(kwargs or {}))

            with _disable_current_modes(), torch.no_grad():
                self._compare(primitive.name, implementation, lambda: [flat[place].detach().clone() for place in places])
        return func(*args, **(kwargs or {}))

    def _compare(self, name, implementation, operands):
        try:
            traced = make_fx(implementation, tracing_mode="fake")(*operands())
        except Exception as error:
            self.problems[name] = f"cannot be traced: {error}"
            return
        pairs = zip(*(torch.utils._pytree.tree_leaves(fn(*operands())) for fn in (traced, implementation)), strict=True)
        if not all(_equal(a, b) for a, b in pairs):
            self.problems[name] = "its trace computes something else"


def _equal(a, b):
    """Whether a result is that of a trace: to the bit, but for float32, where a kernel in C++ may stand for torch's ops."""
    if a.dtype == b.dtype == torch.float32:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    return torch.equal(a, b) or (a.isnan().equal(b.isnan()) and a.nan_to_num().equal(b.nan_to_num()))


def _meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _look(x: Tensor) -> tuple:
    return tuple(x.shape), x.dtype, [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _call_all(make) -> None:
    """Calls that reach every primitive, and their gradients."""
    for result in _calls(make):
        if isinstance(result, Tensor) and result.requires_grad:
            result.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_abstract_rules_say_what_implementations_give(dtype, make_tensor):
    """On calls that reach every primitive: shapes, dtypes and strides agree, and costs are whole numbers."""
    with _CompareWithAbstract() as mode:
        _call_all(lambda *shape: make_tensor(shape, dtype, requires_grad=True))
    assert not mode.problems, "\n".join(mode.problems)
    assert mode.seen == set(PRIMITIVES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_implementations_that_are_not_opaque_can_be_traced(dtype, make_tensor):
    """Inductor may look into them: nothing that they do depends on data, and traces keep nothing of each other."""
    with _CompareWithTrace() as mode:
        _call_all(lambda *shape: make_tensor(shape, dtype, requires_grad=True))
    assert not mode.problems, "\n".join(f"{name}: {why}" for name, why in mode.problems.items())


@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=lambda p: p.name)
def test_every_rule_is_there(primitive):
    """Abstract, implementation, sharding, cost; batching unless the op takes lists, which only programs make."""
    rules = {"abstract": primitive.abstract, "impl": primitive.impl, "cost": primitive.cost, "sharding": primitive.placement.rule}
    if not primitive.signature.takes_lists:
        rules["batching"] = primitive.transforms.batching
    assert [name for name, rule in rules.items() if rule is None] == []


@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=lambda p: p.name)
def test_sharding_rules_are_consistent(primitive):
    """Factors that are replicated, linear operands and factors with a program of their own exist in the rule."""
    params = {key: {"equation": "ab,bc->ac"} for key in ("einsum", "einsum_add", "einsum_add_over", "joined_linear")}
    params["dropout"] = {"rate": 0.5, "starts": [0] * 4}
    params |= {name: {"shape": [1] * 4, "starts": [0] * 4} for name in ("random_uniform", "random_normal")}
    params["token_dropout"] = {"rate": 0.5, "key": [1, 2], "token_dims": 2, "starts": [0] * 2}
    params |= {"quantise_fp8": {"block": "1x128"}, "dequantise_fp8": {"block": "row", "dtype": torch.float32}}
    params["fp8_matmul"] = {"a_block": "1x128", "b_block": "128x128", "dtype": torch.bfloat16}
    params |= {name: {"group": [1, 2]} for name in ("limit_capacity", "sinkhorn", "expert_slots")}
    params["eigenbasis"] = {"dims": 1, "every": 1}
    params["newton_schulz"] = {"rows": 1, "columns": 1, "num_rounds": 5, "narrow": False}
    rule = primitive.sharding_rule(**params.get(primitive.name, {}))
    factors = {name for dims in (*rule.operands, *rule.results) for names in dims for name in names}
    assert rule.need_replication <= factors
    assert rule.linear | rule.leads <= set(primitive.operands)
    assert set(primitive.placement.sharded) <= factors
    assert len(rule.operands) == len(primitive.operands) and len(rule.results) == len(primitive.results)
