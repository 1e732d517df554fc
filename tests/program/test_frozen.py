"""Frozen parameters: a step is torch.autograd's without them, and nothing is computed or sent that no trained one needs."""

import copy
import functools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models, ops, testing, tree
from mpar.chain import Chain, Segment
from mpar.compiler import RecomputePolicy, Schedule
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step
from tests.forecast.test_prediction import measured_peaks, predicted_peaks
from tests.program.oracle import BASE, DEEPSEEK, MOE, Problem, Recorder

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
SHAPE = (16, 8)
MASKS = {
    "embedding only": {"names": ["*"], "trainable": ["embed"]},
    "second half": {"segments": ["embed", "layers.[01]"]},
    "norms only": {"names": ["*"], "trainable": ["*norm*"]},
    "head only": {"names": ["*"], "trainable": ["lm_head"]},
    "one matrix of a layer": {"names": ["*"], "trainable": ["*.o_proj.weight"]},
}
MODELS = {
    "llama": {**BASE, "model_type": "llama", "num_hidden_layers": 4},
    "experts": {**MOE, "num_hidden_layers": 4},
    "experts with biases": {**DEEPSEEK, "num_hidden_layers": 4},
}


@functools.cache
def problem(model: str, mask: str, packed: bool = False) -> Problem:
    """The problem of a model, with this mask."""
    router = {"bias_rate": 0.01} if model == "experts with biases" else None
    return Problem(MODELS[model], SHAPE, router=router, num_microbatches=4, packed=packed).freeze(**MASKS[mask])


def compiled(found: Problem, mesh: Mesh, strategy: str, schedule: Schedule | str | None = None, **options) -> Program:
    return compile_step(found.model, Recorder(), mesh, strategy, found.shapes, num_microbatches=4, schedule=schedule, **options)

COMPUTED = ("forward", "backward", "backward_input", "backward_weight")

CASES = [
    ("llama", Mesh(dp=4), "ddp", None, {}),
    ("llama", Mesh(fsdp=4), "zero2", None, {}),
    ("llama", Mesh(dp=2, fsdp=2), "zero3", None, {"recompute": "selective"}),
    ("llama", Mesh(fsdp=2, tp=2), "zero3_tp_sp", None, {}),
    ("llama", Mesh(tp=4), "tp_sp", None, {"recompute": "full"}),
    ("llama", Mesh(cp=4), "ddp", None, {}),
    ("llama", Mesh(), "ddp", None, {"num_slices": 4}),
    ("llama", Mesh(fsdp=2), "zero3", None, {"num_slices": 2, "recompute": RecomputePolicy("full", offload=True)}),
    ("llama", Mesh(pp=2, dp=2), "ddp", "one_f_one_b", {}),
    ("llama", Mesh(pp=4), "ddp", "one_f_one_b", {}),
    ("llama", Mesh(pp=2, fsdp=2), "zero3", "zbv", {}),
    ("llama", Mesh(pp=2), "ddp", Schedule("zb1p", num_chunks=2), {}),
    ("llama", Mesh(pp=2, tp=2), "tp_sp", Schedule("interleaved", num_chunks=2), {}),
    ("llama", Mesh(pp=2), "ddp", "dual_pipe", {}),
    ("llama", Mesh(pp=2), "ddp", "zb_h1", {"num_slices": 2}),
    ("experts", Mesh(dp=2, fsdp=2), "zero3", None, {}),
    ("experts", Mesh(pp=2, tp=2), "tp_sp", "zbv", {}),
    ("experts with biases", Mesh(pp=2, dp=2), "ddp", "one_f_one_b", {}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_step_is_exact(number):
    """Loss, gradients of what is trained and their norm are torch's, and what is frozen keeps its bits."""
    model, mesh, strategy, schedule, options = CASES[number]
    found = problem(model, list(MASKS)[number % len(MASKS)])
    found.check(compiled(found, mesh, strategy, schedule, **options))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("number", [2, 3, 6, 10, 13, 14, 16])
def test_every_mask_is_exact(number, mask):
    """The same of every mask, on meshes and schedules that treat gradients differently."""
    model, mesh, strategy, schedule, options = CASES[number]
    found = problem(model, mask)
    found.check(compiled(found, mesh, strategy, schedule, **options))


def sent(program: Program, op: str) -> Counter[str]:
    """The bytes that the ranks at all positions along pp give to collectives within instructions `op`, by the collective."""
    found: Counter[str] = Counter()
    for instruction in program.instructions:
        for use in program.kinds[instruction.kind].collectives if instruction.op == op else ():
            found[use.op] += use.bytes
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_nothing_is_reduced_or_kept_for_what_is_frozen(strategy):
    """The bytes of reductions are those of the trained parameters, there are slots of these only, and what is frozen is sharded
    and gathered as before."""
    mesh = Mesh(dp=4) if strategy == "ddp" else Mesh(fsdp=4)
    found, how = problem("llama", "second half"), {"bucket_bytes": 0}
    whole, part = (compile_step(m, AdamW(1e-3), mesh, strategy, found.shapes, **how) for m in (found.model.base, found.model))
    sizes = {path: leaf.numel() for path, leaf in tree.leaves_with_path(found.model.abstract_params)}
    trained = {path for path in sizes if path not in found.model.frozen}
    assert sum(sent(part, "reduce").values()) == 8 * sum(sizes[path] for path in trained)
    assert sum(sent(whole, "reduce").values()) == 8 * sum(sizes.values())
    slots = {leaf.path for leaf in part.state_in if leaf.path.startswith("opt.")}
    assert slots == {f"opt.{slot}.{path}" for path in trained for slot in "mv"}
    shards = [leaf.spec for leaf in part.state_in if leaf.path == "params.layers.0.mlp.up_DF"]
    assert shards == [leaf.spec for leaf in whole.state_in if leaf.path == "params.layers.0.mlp.up_DF"]
    if strategy == "zero3":  # for the forward, and but for the last ones once more for the backward, if there is one
        again = sum(sent(whole, "gather").values()) - sum(sent(part, "gather").values())
        assert again == 8 * sum(sizes[path] for path in found.model.frozen if not path.startswith("embed")) // 4


@pytest.mark.parametrize("schedule", ["one_f_one_b", Schedule("zb1p", num_chunks=2), "zbv", "dual_pipe"])
def test_no_gradient_travels_before_the_first_trained_stage(schedule):
    """Stages before the first parameter that is trained neither receive nor send gradients, and have no backward."""
    found = problem("llama", "head only")
    part = compiled(found, Mesh(pp=2), "ddp", schedule)
    assert Counter(message.kind for message in part.messages()).keys() <= {"F", "G"}
    backwards = {instruction.segment for instruction in part.instructions if instruction.op.startswith("backward")}
    assert backwards == {"head"}
    first = part.facts.stage_of["head"]
    assert all(action.kind == "F" for row in part.schedule for action in row if action.stage < first)


def test_leaves_of_x_that_depend_on_nothing_trained_have_no_gradient():
    """Of an x of two leaves, only the one that depends on a trained parameter has a gradient, which alone is sent back."""
    chain = TwoStreams()
    program = compile_step(chain, Recorder(), Mesh(pp=2), "ddp", (4, 8), num_microbatches=2)
    back = [message.bytes for message in program.messages() if message.kind == "B"]
    forth = [message.bytes for message in program.messages() if message.kind == "F"]
    assert sum(back) * 2 == sum(forth) > 0
    generator = torch.Generator().manual_seed(0)
    like = chain.abstract_params
    params = {path: torch.randn(leaf.shape, dtype=torch.float64, generator=generator) for path, leaf in like.items()}
    batch = {key: torch.randint(0, 16, (4, 8), generator=generator) for key in ("tokens", "labels")}
    state, _ = program.simulate(program.init_state(params), batch)
    leaf = params["policy"].clone().requires_grad_()
    loss = two_streams_loss(leaf, params, batch) / batch["labels"].numel()
    (expected,) = torch.autograd.grad(loss, leaf)
    testing.assert_close(state.leaves["opt.g.policy"], expected, name="gradient")


def test_what_is_detached_has_no_gradient():
    """A result that depends on a trained parameter, but through which no gradient flows, is no source of gradients further on."""

    class Detached(TwoStreams):
        segments = (
            replace(TwoStreams.segments[0], fn=_embed_detached),
            *TwoStreams.segments[1:],
        )
        frozen = frozenset({"gain", "reference_gain"})

    program = compile_step(Detached(), Recorder(), Mesh(pp=2), "ddp", (4, 8), num_microbatches=2)
    back = [message.bytes for message in program.messages() if message.kind == "B"]
    forth = [message.bytes for message in program.messages() if message.kind == "F"]
    assert sum(back) * 2 == sum(forth) > 0


def _embed_detached(params, x, context, *, training):
    policy, reference = _embed(params, x, context, training=training)[0]
    return (policy, reference.detach()), {}


def _embed(params, x, context, *, training):
    return tuple(ops.embedding(context["tokens"], table) for table in params), {}


def _scale(params, x, context, *, training):
    return tuple(leaf * weight for leaf, weight in zip(x, params, strict=True)), {}


def _compare(params, x, context, *, training):
    policy, reference = x
    return None, {"loss": ((policy - reference) * policy).square().sum()}


class TwoStreams(Chain):
    """A policy and a frozen reference, side by side in x."""

    BOTH = (("batch", "seq", "embed"),) * 2
    segments = (
        Segment("embed", _embed, ("policy", "reference"), BOTH),
        Segment("scale", _scale, ("gain", "reference_gain"), BOTH),
        Segment("compare", _compare, ()),
    )
    abstract_params = {  # noqa: RUF012
        name: torch.empty(shape, dtype=torch.float64, device="meta")
        for name, shape in (("policy", (16, 8)), ("reference", (16, 8)), ("gain", (8,)), ("reference_gain", (8,)))
    }
    param_axes = {"policy": (None, "embed"), "reference": (None, "embed"), "gain": ("embed",), "reference_gain": ("embed",)}  # noqa: RUF012
    batch_axes = dict.fromkeys(("tokens", "labels"), ("batch", "seq"))
    frozen = frozenset({"reference", "reference_gain"})

    def context(self, batch, row_length=None):
        return batch

    def weight(self, batch):
        return torch.ones_like(batch["labels"], dtype=torch.float64).sum()


def two_streams_loss(policy, params, batch):
    x, reference = (table[batch["tokens"]] for table in (policy, params["reference"]))
    x, reference = x * params["gain"], reference * params["reference_gain"]
    return ((x - reference) * x).square().sum()


def test_backward_of_frozen_layers_makes_no_gradients_of_weights():
    """Where the embedding alone is trained, the backward lacks all products that give gradients of matrices, and no others."""
    found = problem("llama", "embedding only")
    whole, part = (compile_step(m, Recorder(), Mesh(), "ddp", found.shapes) for m in (found.model.base, found.model))
    before, after = (
        sum(program.kinds[i.kind].flops for i in program.instructions if i.op == "backward") for program in (whole, part)
    )
    leaves = dict(tree.leaves_with_path(found.model.abstract_params))
    matrices = sum(leaf.numel() for path, leaf in leaves.items() if leaf.ndim > 1 and path in found.model.frozen)
    assert before - after == 2 * math.prod(SHAPE) * matrices


@pytest.mark.parametrize(
    ("mesh", "strategy", "schedule"),
    [(Mesh(dp=2), "ddp", None), (Mesh(tp=2), "tp_sp", None), (Mesh(pp=2), "ddp", "zb1p")],
    ids=str,
)
def test_a_loss_in_chunks_makes_no_gradient_of_a_frozen_head(mesh, strategy, schedule):
    """The step is exact, and the FLOPs of the last segment lack the product that gives the gradient of the head."""
    whole = Problem(MODELS["llama"], SHAPE, num_microbatches=4, logits_chunk=8)
    part = whole.freeze(names=["lm_head"])
    programs = [compiled(found, mesh, strategy, schedule) for found in (whole, part)]
    part.check(programs[1])
    of_head = [
        sum(program.kinds[i.kind].flops for i in program.instructions if i.segment == "head" and i.op in COMPUTED)
        for program in programs
    ]
    ranks = 2 if "pp" not in mesh.axes or mesh.axis_size("pp") == 1 else 1
    head = tree.get(whole.model.abstract_params, "head.head_DV").numel()
    assert of_head[0] - of_head[1] == 2 * math.prod(SHAPE) * head // ranks


def test_stored_as_computed_and_equal_in_bits():
    """In bf16 a frozen parameter is stored in bf16, and losses have the bits of a copy in float32 that each step casts."""
    model = models.from_config(MODELS["llama"])
    frozen = models.freeze(model, ratio=0.5)
    params, batch = model.init(0), problem("llama", "norms only").batch
    results = []
    for chain in (model, frozen):
        program = compile_step(chain, AdamW(1e-2), Mesh(fsdp=2), "zero3", SHAPE, precision="bf16")
        state, metrics = program.simulate(program.init_state(params), batch)
        stored = [leaf for leaf in program.state_in if leaf.path.startswith("params.")]
        dtypes = {leaf.path.removeprefix("params."): leaf.dtype for leaf in stored}
        assert all((dtype is torch.bfloat16) == (path in chain.frozen) for path, dtype in dtypes.items())
        results.append((metrics["loss"], {path: state.leaves[f"params.{path}"] for path in dtypes}))
    (loss, updated), (frozen_loss, kept) = results
    assert torch.equal(loss, frozen_loss)
    assert any(not torch.equal(updated[path].to(torch.bfloat16), kept[path]) for path in frozen.frozen)
    for path, leaf in tree.leaves_with_path(params):
        assert path not in frozen.frozen or torch.equal(kept[path], leaf.to(torch.bfloat16))


@pytest.mark.parametrize("mask", ["second half", "norms only"])
def test_peak_is_exact(mask):
    """The predicted peak of every position is what a run holds, to the byte, and it is smaller than without freezing."""
    found = problem("llama", mask)
    whole, part = (compiled(of_model(found, m), Mesh(pp=2, fsdp=2), "zero3", "zbv") for m in (found.model.base, found.model))
    assert measured_peaks(part, found.state(), found.batch) == predicted_peaks(part)
    assert max(part.peaks()) < max(whole.peaks())


def test_only_what_a_backward_reads_goes_to_the_host():
    """Segments without a backward offload nothing, and of those that have one only what it reads."""
    found = problem("llama", "second half")
    program = compiled(found, Mesh(), "ddp", recompute=RecomputePolicy("full", offload=True))
    offloaded = {instruction.segment for instruction in program.instructions if instruction.op == "offload"}
    assert offloaded == {"layers.2", "layers.3"}


def of_model(found: Problem, model: models.Trainable) -> Problem:
    other = copy.copy(found)
    other.model = model
    return other
