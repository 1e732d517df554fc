"""Order: hiding communication changes no bit, makes no step longer by prediction, and keeps to the memory of the device."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh, Precision
from mpar.forecast import predicted_times
from mpar.ir import HOME, plan_streams
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from tests.compiler.box import BOX
from tests.compiler.random_programs import MODEL, both, makespan, random_pair

OPTIMIZER = AdamW(lr=1e-3)


@pytest.mark.parametrize("seed", [*range(24), 194, 308])  # in the last two, copies and reductions would wait for joined layers
def test_random_programs_are_no_longer_and_fit(seed, make_state, batch):
    """Whatever the hardware, the mesh and the options: proved, no longer, within memory or what was needed, bit for bit."""
    pair = random_pair(seed)
    pair.check_order()
    state = make_state(MODEL)
    (a, metrics), (b, others) = pair.as_written.simulate(state, batch), pair.ordered.simulate(state, batch)
    assert torch.equal(metrics["loss"], others["loss"])
    assert all(torch.equal(a.leaves[path], b.leaves[path]) for path in a.leaves)


def test_reductions_hide_behind_backwards(make_model):
    """Links that need less time than computation: all but the last reduction is hidden, and computation waits for no other."""
    as_written, ordered = both(lambda: make_model(num_hidden_layers=6), BOX, Mesh(dp=2), "ddp", num_microbatches=1)
    exposed = predicted_times(ordered, BOX).exposed[0]
    reductions = [line for line, step in enumerate(ordered.parts[0].instructions) if step.op == "reduce"]
    assert set(exposed) <= set(reductions[-1:])
    assert len(predicted_times(as_written, BOX).exposed[0]) >= len(reductions) - 1
    assert makespan(ordered, BOX) < makespan(as_written, BOX)


def test_gathers_hide_behind_forwards(make_model):
    """With memory for two layers every gather is early, so that only the first is exposed; without it, none is."""
    as_written, ordered = both(lambda: make_model(num_hidden_layers=6), BOX, Mesh(fsdp=2), "zero3", num_microbatches=1)
    order = [(step.op, step.segment) for step in ordered.parts[0].instructions if step.op in ("gather", "forward")]
    assert order[:4] == [("gather", "embed"), ("gather", "layers.0"), ("forward", "embed"), ("gather", "layers.1")]
    small = replace(BOX, memory_bytes=1)
    _, kept = both(lambda: make_model(num_hidden_layers=6), small, Mesh(fsdp=2), "zero3", num_microbatches=1)
    assert kept.peaks() == as_written.peaks()
    assert [(s.op, s.segment) for s in kept.parts[0].instructions if s.op == "gather"] == [
        (s.op, s.segment) for s in as_written.parts[0].instructions if s.op == "gather"
    ]


def test_frees_wait_for_memory_only(make_model):
    """Links so slow that reductions pile up: with little memory their operands are freed one by one, with much later."""
    slow = replace(BOX, link_bytes_per_s=2e6)
    as_written, much = both(lambda: make_model(num_hidden_layers=6), slow, Mesh(dp=2), "ddp", num_microbatches=1)
    limit = (as_written.peaks()[0] + much.peaks()[0]) // 2
    small = replace(slow, memory_bytes=int(limit / 0.9) + 1)
    _, some = both(lambda: make_model(num_hidden_layers=6), small, Mesh(dp=2), "ddp", num_microbatches=1)
    assert as_written.peaks()[0] < some.peaks()[0] <= limit < much.peaks()[0]
    assert makespan(much, slow) <= makespan(some, slow) < makespan(as_written, slow)


def test_norms_are_taken_as_gradients_come(make_model):
    """The gradient of the embedding is reduced last, and so its norm is taken last."""
    _, ordered = both(lambda: make_model(num_hidden_layers=4), BOX, Mesh(dp=2), "ddp")
    norms = [step.segment for step in ordered.parts[0].instructions if step.op == "norm" and step.segment]
    assert norms[-1] == "embed"
    assert sorted(norms) == sorted(set(norms))


def test_without_a_profile_nothing_moves(make_model):
    """No hardware, or hardware that does one thing at a time: the order is that in which the program was written."""
    plain = compile_step(make_model(), OPTIMIZER, Mesh(fsdp=2), "zero3", (8, 8), num_microbatches=2, bucket_bytes=0)
    as_written, _ = both(make_model, BOX, Mesh(fsdp=2), "zero3")
    assert [s.words for s in plain.instructions] == [s.words for s in as_written.instructions]
    assert [s.frees for s in plain.instructions] == [s.frees for s in as_written.instructions]


def test_one_rank_stays_as_it_is(make_model):
    """Without another queue there is nothing to hide."""
    as_written, ordered = both(make_model, BOX, Mesh(), "ddp")
    assert ordered.instructions == as_written.instructions
    assert {issue.queue for issue in plan_streams(ordered.instructions, ordered.values, ordered.kinds)} == {HOME}


def test_mixed_precision_is_ordered_too(make_model):
    """Gathers that cast on the way."""
    as_written, ordered = both(lambda: make_model(torch.float32), BOX, Mesh(fsdp=2), "zero3", precision=Precision(torch.bfloat16))
    assert makespan(ordered, BOX) < makespan(as_written, BOX)
