"""The split of backward: both halves together against plain torch, and against the backward that they are made of."""

import functools
import re
from collections import Counter

import pytest
import torch

from mpar import Mesh, models, testing, tree
from mpar.arrange import arrange
from mpar.chain import Segment
from mpar.compiler import RecomputePolicy
from mpar.compiler.build._units import make_units
from mpar.compiler.segment import (
    SegmentSpecs,
    Target,
    compile_function,
    compile_segment,
    split_segment,
    trace_segment,
)
from mpar.compiler.segment._split import split_backward
from mpar.kernels import KERNELS
from mpar.ops import constrain
from mpar.precision import precision
from mpar.runtime import ALONE, load
from mpar.runtime.comm._lockstep import run_ranks
from mpar.sharding import lower, trace
from mpar.shards import shard
from mpar.spec import P
from mpar.strategy import PRESETS, preset
from mpar.torch_private import storage_key
from tests.compiler.split_cases import CASES, Case, D, F, context_scale, normal, random_case

POLICIES = [
    RecomputePolicy("none"),
    RecomputePolicy("full"),
    RecomputePolicy("selective"),
    RecomputePolicy("budget", budget=600),
]
CPU = torch.device("cpu")


def run(code, operands, comm=ALONE):
    """What a compiled code gives."""
    with torch.no_grad():
        return load(code.kind.name, code.kind.source, code.kind.constants, CPU)(list(operands), comm)


def run_halves(code, primals, kept, cotangents, comm=ALONE):
    """Gradients of parameters and of x by the two halves."""
    split = split_segment(code)
    out = run(split.input, pick(split.input_reads, primals, split.input_kept, kept, (), split.input_cotangents, cotangents), comm)
    num_gradients = len(code.traced.active_x)
    assert len(out) == num_gradients + split.num_crossing
    dx, crossing = out[:num_gradients], out[num_gradients:]
    given = pick(split.weight_reads, primals, split.weight_kept, kept, crossing, split.weight_cotangents, cotangents)
    return run(split.weight, given, comm), dx


def pick(reads, primals, which, kept, crossing, of, cotangents):
    """Operands of a half."""
    return [*(primals[i] for i in reads), *(kept[i] for i in which), *crossing, *(cotangents[i] for i in of)]


def calls(*codes):
    """How often each op that is not a view is called; tensors in a collective count one by one."""
    count = Counter()
    for code in codes:
        functions = dict(re.findall(r"^(f\d+) = (.*)$", code.kind.source, re.MULTILINE))
        for name in re.findall(r" = (f\d+)\(", code.kind.source):
            op = functions[name].replace("_.Tensor", ".Tensor")  # in place or not
            found = re.match(r"torch\.ops\.aten\.(\w+)\.(\w+)", op)
            if found is None or not getattr(getattr(torch.ops.aten, found[1]), found[2]).is_view:
                count[op] += 1
        for use in code.kind.collectives:
            count[use.op] += use.tensors
    del count["torch.ops.aten.reshape.default"]
    return count


# Segments of our own, on one rank


def meta(t):
    return None if t is None else torch.empty_like(t, device="meta")


def compile_case(case, recompute, grad_dtype=torch.float64):
    """The segment of a case on one rank."""
    params, x, context = tree.map_leaves(meta, (case.params, case.x, case.context))
    paths = tuple(f"p{i}" for i in range(len(params)))
    traced = trace_segment(Segment("s", case.fn, paths), params, x, context, training=True)
    specs = [(P(),) * n for n in (traced.num_params, traced.num_x, traced.num_context, len(traced.x_out))]
    target = Target(Mesh(dp=1), preset("ddp").compute, recompute, KERNELS)
    return compile_segment("s", traced, SegmentSpecs(*specs), target)


def primals_of(case):
    return [*case.params, *(tree.leaves(case.x) if case.x is not None else []), *tree.leaves(case.context)]


def assert_like_autograd(case, recompute):
    code = compile_case(case, recompute)
    primals = primals_of(case)
    out = run(code.forward, primals)
    results, kept = out[: len(out) - code.num_kept], out[len(out) - code.num_kept :]
    cotangents = [normal(*results[i].shape) + 0.5 for i in code.traced.active_out]
    d_params, d_x = run_halves(code, primals, kept, cotangents)
    whole = run(code.backward, [*(primals[i] for i in code.reads), *kept, *cotangents])
    assert all(torch.equal(a, b) for a, b in zip([*d_params, *d_x], whole, strict=True))

    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in primals]
    num_params, num_x = code.traced.num_params, code.traced.num_x
    x = None if case.x is None else tree.unflatten(tree.flatten(case.x)[1], leaves[num_params : num_params + num_x])
    context = tree.unflatten(tree.flatten(case.context)[1], leaves[num_params + num_x :])
    value, losses = case.fn(tuple(leaves[:num_params]), x, context, training=True)
    targets = [*tree.leaves(() if value is None else value), *(losses[key] for key in sorted(losses))]
    wanted = [leaf for leaf in leaves[: num_params + num_x] if leaf.requires_grad]
    reached = [(targets[i], dy) for i, dy in zip(code.traced.active_out, cotangents, strict=True)]
    expected = torch.autograd.grad([t for t, _ in reached], wanted, [dy for _, dy in reached], allow_unused=True)
    found = dict(zip(map(id, wanted), expected, strict=True))
    for index, (actual, leaf) in enumerate(zip([*d_params, *d_x], wanted, strict=True)):  # integers have no gradient
        grad = found.get(id(leaf))
        if grad is None:
            assert torch.equal(actual, torch.zeros_like(leaf)), index
        else:
            testing.assert_close(actual, grad, name=f"gradient {index}")


@pytest.mark.parametrize("recompute", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("name", CASES)
def test_halves_equal_autograd(name, recompute):
    """The halves give every gradient that plain torch gives, zero for what has none, and the bits of the backward."""
    assert_like_autograd(CASES[name], recompute)


def assert_whole(code):
    """No view crosses, nothing crosses twice."""
    crossing = split_segment(code).input.out_values[len(code.traced.active_x) :]
    assert len({storage_key(v) for v in crossing}) == len(crossing)
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in crossing)


@pytest.mark.parametrize("seed", range(60))
def test_random_segments_compute_nothing_twice(seed):
    """Where only constants follow from parameters or context alone, each op runs once, and bases cross instead of views."""
    code = compile_case(random_case(seed, mixed=True), POLICIES[seed % len(POLICIES)])
    split = split_segment(code)
    extra = calls(split.input, split.weight) - calls(code.backward)
    assert set(extra) <= {"torch.ops.aten.full.default"}
    assert_whole(code)


@pytest.mark.parametrize("seed", range(60))
def test_halves_of_random_segments_equal_autograd(seed):
    """Values shared at random between gradients of input and of parameters come out the same."""
    assert_like_autograd(random_case(seed), POLICIES[seed % len(POLICIES)])


# Models, on every mesh

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": {},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_one_kv_head": {"num_key_value_heads": 1},
    "qwen2_window_tied": {
        "model_type": "qwen2", "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3"},
}  # fmt: skip
SIZES = {"ddp": {"dp": 2}, "zero": {"fsdp": 2}, "hsdp": {"dp": 2, "fsdp": 2}}
B, S = 4, 8


def mesh_of(strategy):
    """A mesh on which a preset does something."""
    name, tp = strategy.partition("_")[0], {"tp": 2} if "tp" in strategy else {}
    return Mesh(**tp) if name == "tp" else Mesh(**SIZES[name.rstrip("123")], **tp)


def a_batch():
    generator = torch.Generator().manual_seed(3)
    batch = {key: torch.randint(0, 61, (B, S), generator=generator) for key in ("tokens", "labels")}
    batch["documents"] = torch.arange(S).expand(B, S) // 3
    return batch


@functools.cache
def compile_chain(name, strategy_name, recompute, number, chunk=None):
    """(model, refined mesh, (segment, its code, dtypes of its parameters) of each, context's code, specs of its operands)."""
    config = {**CONFIG, **MODELS[name]}
    model = models.from_config(config, dtype=torch.float32, vocab_multiple=8, logits_chunk=chunk)
    strategy, mesh = arrange(preset(strategy_name), mesh_of(strategy_name), model.abstract_params, model.param_axes)
    numbers = precision(number)
    units = make_units(model, strategy, mesh, numbers)
    batch = tree.map_leaves(meta, a_batch())
    batch_specs = [strategy.compute_spec(model.batch_axes[key], mesh) for key in batch]
    target = Target(mesh, strategy.compute, recompute, KERNELS)
    context = compile_function("context", model.context, (batch,), target, batch_specs, resolve=True)
    shapes = tree.map_leaves(meta, model.context(a_batch()))
    x, x_specs, out = None, [], []
    for segment in model.segments:
        read = [units[path] for path in segment.paths]
        structure = tree.flatten(tuple(tree.get(model.abstract_params, path) for path in segment.paths))[1]
        leaves, dtypes = [leaf for unit in read for _, leaf in unit.leaves], [d for unit in read for d in unit.compute_dtypes]
        params = tree.unflatten(structure, [leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])
        traced = trace_segment(segment, params, x, shapes, training=True)
        specs = [spec for unit in read for spec in unit.compute]
        out_specs = [strategy.compute_spec(segment.out_axes, mesh)] if traced.x_out else []
        places = SegmentSpecs(tuple(specs), tuple(x_specs), context.out_specs, tuple(out_specs))
        code = compile_segment(segment.name, traced, places, target)
        out.append((segment, code, dtypes))
        x, x_specs = traced.x_out[0] if traced.x_out else None, out_specs
    return model, mesh, out, context, batch_specs


def both_ways(model, mesh, codes, context_code, batch_specs):
    """On every rank, for every segment: gradients by backward, gradients by the halves."""
    params, batch = model.init(0), a_batch()

    def work(rank, comm):
        rows = [shard(x, spec, mesh, rank) for x, spec in zip(batch.values(), batch_specs, strict=True)]
        context, x, out = run(context_code, rows, comm), (), []
        for segment, code, dtypes in codes:
            leaves = [leaf for path in segment.paths for leaf in tree.leaves(tree.get(params, path))]
            specs = code.forward.in_specs
            local = [
                shard(leaf, spec, mesh, rank).to(dtype).clone() for leaf, spec, dtype in zip(leaves, specs, dtypes, strict=False)
            ]
            primals = [*local, *x, *context]
            results = run(code.forward, primals, comm)
            num_results = len(results) - code.num_kept
            results, kept = results[:num_results], results[num_results:]
            generator = torch.Generator().manual_seed(7 + rank)
            cotangents = [torch.randn(results[i].shape, generator=generator).to(results[i].dtype) for i in code.traced.active_out]
            whole = run(code.backward, [*(primals[i] for i in code.reads), *kept, *cotangents], comm)
            d_params, d_x = run_halves(code, primals, kept, cotangents, comm)
            out.append((segment.name, whole, [*d_params, *d_x]))
            x = results[: len(code.traced.x_out)]
        return out

    return run_ranks(mesh, work)


def assert_same_bits(ranks):
    for rank, segments in enumerate(ranks):
        for name, whole, halves in segments:
            for index, (a, b) in enumerate(zip(whole, halves, strict=True)):
                assert a.dtype == b.dtype and torch.equal(a, b), (rank, name, index)
                assert a.isfinite().all()


@pytest.mark.parametrize("strategy", sorted(PRESETS))
@pytest.mark.parametrize("model", MODELS)
def test_halves_give_the_bits_of_backward(model, strategy):
    """On every rank, for every segment of every model under every strategy."""
    recompute = POLICIES[(list(MODELS).index(model) + sorted(PRESETS).index(strategy)) % len(POLICIES)]
    assert_same_bits(both_ways(*compile_chain(model, strategy, recompute, None)))


@pytest.mark.parametrize("recompute", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("strategy", ["ddp", "tp", "zero3_tp_sp"])
def test_halves_give_the_bits_of_backward_in_bfloat16(strategy, recompute):
    """With gradients widened, the loss in chunks, and under every recompute policy."""
    assert_same_bits(both_ways(*compile_chain("qwen3", strategy, recompute, "bf16", 8)))


@pytest.mark.parametrize("recompute", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("strategy", ["ddp", "tp", "tp_sp"])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_computed_twice(model, strategy, recompute):
    """The halves together call every op, collectives included, as often as backward does; views do not count."""
    for segment, code, _ in compile_chain(model, strategy, recompute, None)[2]:
        split = split_segment(code)
        assert calls(split.input, split.weight) == calls(code.backward), segment.name
        einsum = "PRIMITIVES['einsum']"
        assert segment.name == "embed" or (calls(split.input)[einsum] and calls(split.weight)[einsum])


def held(code):
    """Bytes of what W is given: kept, crossing and cotangents, but no parameters and no context."""
    split, traced = split_segment(code), code.traced
    alive = range(traced.num_params, traced.num_params + traced.num_x)
    operands = list(split.weight_reads) + [traced.num_params] * (len(split.weight.in_values) - len(split.weight_reads))
    return sum(v.nbytes for i, v in zip(operands, split.weight.in_values, strict=True) if i in alive)


@pytest.mark.parametrize("recompute", POLICIES[:3], ids=lambda p: p.kind)
def test_what_a_block_holds_for_w(recompute):
    """Two operands of each of the seven matrix products, shared ones once, and two gradients of gains; no parameter is read.

    Whatever the policy: W recomputes nothing that needs more to be held.
    """
    model, _, segments, *_ = compile_chain("llama", "ddp", recompute, None)
    code = segments[1][1]
    rows, D, c = B // 2 * S, model.config.hidden_size, model.config.layers[0]
    F, Q, K = c.mlp.size, c.mixer.num_heads * c.mixer.head_size, c.mixer.num_kv_heads * c.mixer.head_size
    operands = 2 * D + Q + F  # normed twice, attention's result, the activation
    gradients = 2 * F + Q + 2 * K + 2 * D  # of gate, up, q, k, v, and of both results that the residual stream takes
    assert held(code) == 4 * (rows * (operands + gradients) + 2 * D)
    assert min(split_segment(code).weight_reads, default=code.traced.num_params) >= code.traced.num_params


@pytest.mark.parametrize("recompute", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("strategy", ["ddp", "zero3_tp_sp"])
@pytest.mark.parametrize("model", MODELS)
def test_only_whole_values_cross_and_all_operands_are_read(model, strategy, recompute):
    """No view crosses, nothing crosses twice, and no half is given what it does not read."""
    for _, code, _ in compile_chain(model, strategy, recompute, None)[2][1:]:
        split = split_segment(code)
        assert_whole(code)
        for half in (split.input, split.weight):
            names = re.search(r"^    ((?:v\d+, )+)= args$", half.kind.source, re.MULTILINE)[1].split(", ")[:-1]
            body = half.kind.source.partition("args.clear()")[2]
            assert all(re.search(rf"(?<!del ){name}\b", body) for name in names)


def test_activation_runs_in_i_where_it_frees_its_operands():
    """Of gate and up, kept, only their product's activation is held when W is all that reads it."""
    case = CASES["block"]
    code = compile_case(case, RecomputePolicy("selective"))
    split = split_segment(code)
    assert calls(split.input)["PRIMITIVES['swiglu']"] == 1 and calls(split.weight)["PRIMITIVES['swiglu']"] == 0
    assert sorted(tuple(v.shape) for v in split.weight.in_values).count((3, F)) == 3  # activation, gradients of gate and up


def test_what_follows_from_context_does_not_cross():
    """W makes it again, like the product of it and x, which is as large as x."""
    case = Case(context_scale, (normal(D, F),), normal(3, D), {"c": normal(3, D)})
    split = split_segment(compile_case(case, RecomputePolicy("full")))
    assert split.num_crossing == 0
    assert calls(split.input)["torch.ops.aten.sin.default"] == calls(split.weight)["torch.ops.aten.sin.default"] == 1


def test_first_segment_and_one_without_parameters():
    """One has nothing in I, the other nothing in W: their other half is the very backward."""
    first, bare = (compile_case(CASES[name], POLICIES[0]) for name in ("first", "no_parameters"))
    assert split_segment(first).weight is first.backward and split_segment(first).input.kind.results == ()
    assert split_segment(bare).input is bare.backward and split_segment(bare).weight.kind.results == ()


def test_compiled_once():
    """Asking again gives the same code."""
    code = compile_case(CASES["block"], POLICIES[0])
    assert split_segment(code) is split_segment(code)


def split_graph(fn, num_grads, context=(), mesh=None, specs=None):
    """Names of ops in I and in W of a backward that `fn(a, b, dy)` is: gradients of parameters, then of the input."""
    args = [torch.empty(4, 4) for _ in range(3)]
    graph = lower(trace(fn, args), mesh or Mesh(dp=1), specs or [P()] * 3).graph
    halves = split_backward(graph, num_grads, 1, (), context)
    return [[str(n.target) for n in half.nodes if n.op == "call_function"] for half in (halves.input, halves.weight)]


def test_an_op_moves_to_i_with_the_ops_before_it_or_not_at_all():
    """The sum would free b, but it needs tanh(a), which a product of W needs as well: moving both would hold more than b."""

    def fn(a, b, dy):
        m = torch.tanh(a)
        return a @ a, m @ dy, (m * b).sum(0), torch.sin(dy)

    in_i, in_w = split_graph(fn, 3)
    assert in_i == ["aten.sin.default"] and in_w.count("aten.tanh.default") == 1


def test_context_that_is_gathered_crosses():
    """A collective is not run twice, even where its operand is there for both."""

    def fn(a, b, dy):
        full = constrain(a, (None, None))
        return full @ dy, dy @ full

    in_i, in_w = split_graph(fn, 1, (0,), Mesh(tp=2), [P("tp"), P(), P()])
    assert sum("all_gather" in op for op in in_i) == 1 and not any("all_gather" in op for op in in_w)


def test_parts_of_a_split_do_not_cross():
    """They are views: what was split crosses."""

    def fn(a, b, dy):
        left, right = torch.tanh(dy).split(2, 1)
        return left @ a[:2], right @ b[:2]

    in_i, in_w = split_graph(fn, 1)
    assert in_i.count("aten.split.Tensor") == in_w.count("aten.split.Tensor") == 1
    assert "aten.tanh.default" in in_i and "aten.tanh.default" not in in_w
