"""An update is made if loss and gradient norm are finite and within their limits; else the state keeps its bits."""

import copy
import math
import threading
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, compile_step, tree
from mpar.compiler import Schedule
from mpar.errors import ProgramError
from mpar.hardware import hardware
from mpar.optim import SGD, AdamW
from mpar.program import Limits, Program, RankRun, State
from mpar.proof import verify
from mpar.runtime import batch_rows
from mpar.runtime.comm import run_ranks
from mpar.shards import shard
from mpar.train._first_tensor import first_not_finite

BAD_TOKEN = 95
MESHES = {
    "one": (Mesh(), "ddp", None),
    "zero3": (Mesh(fsdp=2), "zero3", None),
    "zero1 tp": (Mesh(fsdp=2, tp=2), "zero1_tp", None),
    "pp zero3": (Mesh(pp=2, fsdp=2), "zero3", "one_f_one_b"),
    "dual": (Mesh(pp=2), "ddp", "dual_pipe"),
    "paired": (Mesh(tp=2), "tp_sp", Schedule(paired=True)),
    "dual paired": (Mesh(pp=2, tp=2), "tp_sp", Schedule("dual_pipe", paired=True)),
}
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2),
    "momentum": SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd": SGD(lr=1e-2, weight_decay=0.1),
}


@pytest.fixture
def compiled(make_model):
    """A function that compiles a step of 8 rows, in 4 microbatches."""

    def compile(mesh: str, optimizer: str = "adamw", model=None, dtype: torch.dtype = torch.float64, **options) -> Program:
        sizes, strategy, schedule = MESHES[mesh]
        links = replace(hardware("reference"), link_bytes_per_s=1e9, link_latency_s=1e-7, launch_s=1e-7)
        options = {"num_microbatches": 4, "schedule": schedule, "hardware": links if "paired" in mesh else None, **options}
        return compile_step(model or make_model(dtype), OPTIMIZERS[optimizer], sizes, strategy, (8, 8), **options)

    return compile


def bits(state: State) -> dict[str, torch.Tensor]:
    return {path: leaf.clone() for path, leaf in state.leaves.items()}


def assert_same_bits(state: State, expected: dict[str, torch.Tensor]) -> None:
    differing = [path for path, leaf in state.leaves.items() if not torch.equal(leaf, expected[path])]
    assert not differing, differing


@pytest.mark.parametrize(
    ("mesh", "optimizer", "dtype"),
    [
        ("one", "adamw", torch.float32),
        ("one", "sgd", torch.float64),
        ("zero3", "momentum", torch.float32),
        ("zero1 tp", "adamw", torch.float64),
        ("pp zero3", "adamw", torch.float32),
        ("dual", "momentum", torch.float64),
    ],
    ids=str,
)
def test_a_step_beyond_a_limit_leaves_the_state(compiled, make_model, batch, mesh, optimizer, dtype):
    """The largest allowed loss and norm give the update that no limits give; with anything smaller, every tensor keeps its bits,
    and the next update is numbered as if the skipped step had not been."""
    program = compiled(mesh, optimizer, dtype=dtype, num_microbatches=4 if mesh == "dual" else 2)
    start = program.init_state(make_model(dtype).init(0))
    free, metrics = program.simulate(start, batch)
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    allowed, _ = program.simulate(start, batch, Limits(loss, norm))
    assert_same_bits(allowed, free.leaves)
    for limits in (Limits(loss=math.nextafter(loss, 0)), Limits(grad_norm=math.nextafter(norm, 0))):
        kept, found = program.simulate(start, batch, limits)
        assert bool(found["skipped"])
        assert_same_bits(kept, start.leaves)
    skipped, found = program.simulate(free, batch, Limits(loss=0.0))
    assert bool(found["skipped"])
    assert (skipped.step, int(skipped.skipped)) == (2, 1)
    assert_same_bits(skipped, free.leaves)
    after, _ = program.simulate(skipped, batch)
    undisturbed, _ = program.simulate(State(free.leaves, 1), batch)
    assert_same_bits(after, undisturbed.leaves)


@pytest.mark.parametrize(
    ("mesh", "where"),
    [
        ("one", "forward"),
        ("zero3", "backward"),
        ("zero1 tp", "forward"),
        ("pp zero3", "backward"),
        ("dual", "forward"),
        ("paired", "forward"),
        ("paired", "backward"),
        ("dual paired", "backward"),
    ],
)
def test_a_poisoned_microbatch_is_skipped_and_named(compiled, make_model, batch, mesh, where):
    """A token of microbatch 2 makes a layer return infinities, or its gradients NaN: no tensor of the state changes on any rank,
    and all ranks name the same first tensor."""
    program = compiled(mesh, model=poisoned(make_model(), where))
    tokens = batch["tokens"].clone()
    tokens[tokens == BAD_TOKEN] = 0
    tokens[4, 3] = BAD_TOKEN
    whole, given = program.init_state(make_model().init(0)), batch | {"tokens": tokens}
    assert any(step.members for part in program.parts for step in part.instructions) is ("paired" in mesh)
    agree = agreement(program.mesh.size)

    def work(rank, comm):
        local = {leaf.path: shard(whole.leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in program.part(rank).state_in}
        run, rows = RankRun(program, comm), batch_rows(program, given, rank)
        state, metrics = run(State(dict(local)), rows)
        assert bool(metrics["skipped"])
        assert math.isfinite(metrics["loss"]) is (where == "backward")
        assert_same_bits(state, local)
        text = first_not_finite(program, rank, run, state, rows, agree)
        assert_same_bits(state, local)
        return text

    (text,) = set(run_ranks(program.mesh, work))
    assert f"a result of `{where} layers.1 mb2`" in text
    assert text.startswith("x3.2" if where == "forward" else "d layers.1.")


def test_a_state_that_is_not_finite_is_named(compiled, make_model, batch):
    """The leaf of the state comes before anything that is computed from it."""
    program = compiled("one")
    state = program.init_state(make_model().init(0))
    state.leaves["opt.v.layers.1.mlp.up_DF"][3, 4] = math.inf
    run, rows = program.bind(), batch_rows(program, batch, 0)
    text = first_not_finite(program, 0, run, state, rows, lambda values: values)
    assert text == "opt.v.layers.1.mlp.up_DF, which the step began with"


def test_the_proof_knows_the_condition(compiled):
    """A norm that reads the limits in the wrong order is refused."""
    program = compiled("one", num_microbatches=1)
    steps = program.parts[0].instructions
    norm = max(line for line, step in enumerate(steps) if step.op == "norm")
    swapped = replace(steps[norm], inputs=(*steps[norm].inputs[:2], *reversed(steps[norm].inputs[2:])))
    spoiled = copy.copy(program)
    spoiled.parts = [replace(program.parts[0], instructions=[*steps[:norm], swapped, *steps[norm + 1 :]])]
    with pytest.raises(ProgramError, match="which are neither gradients nor the sums of all squares, the loss and the limits"):
        verify(spoiled)


def poisoned(model, where: str):
    """The model, whose layer 1 returns infinities at BAD_TOKEN, or zeros there with a gradient that is not a number."""

    def poison(fn):
        def layer(params, x, context, *, training):
            y, *others = fn(params, x, context, training=training)
            bad = (context["tokens"] == BAD_TOKEN)[..., None]
            if where == "forward":
                return tree.map_leaves(lambda leaf: torch.where(bad, math.inf, leaf), y), *others
            return tree.map_leaves(lambda leaf: leaf + torch.where(bad, torch.where(bad, leaf * 0, 1.0).sqrt(), 0.0), y), *others

        return layer

    segments = [replace(s, fn=poison(s.fn), carry=None) if s.name == "layers.1" else s for s in model.segments]
    changed = copy.copy(model)
    changed.__dict__["segments"] = tuple(segments)
    return changed


def agreement(num_ranks: int):
    """A function that, called by all ranks, gives each the highest of all ranks' values."""
    meeting, given = threading.Barrier(num_ranks), []

    def agree(values):
        meeting.wait()
        given.append(values)
        meeting.wait()
        highest = [max(column) for column in zip(*given, strict=True)]
        if meeting.wait() == 0:
            given.clear()
        meeting.wait()
        return highest

    return agree
