"""What segments keep, in the memory of the host until the backward: the same bits, less of the device's memory."""

import pytest
import torch

import mpar
from mpar import Mesh, models
from mpar.compiler import RecomputePolicy
from mpar.optim import AdamW, Constant
from mpar.runtime import init_state

CONFIG = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ROWS, LENGTH, MICROBATCHES = 4, 8, 4


@pytest.fixture(scope="module")
def model():
    """A tiny decoder."""
    return models.from_config(CONFIG, dtype=torch.float32, vocab_multiple=8)


def stepped(model, mesh, recompute, schedule=None):
    """(program, parameters after one step, loss)."""
    optimizer = AdamW(lr=Constant(lr=1e-2, total_steps=4))
    how = {"recompute": recompute, "schedule": schedule, "num_microbatches": MICROBATCHES}
    program = mpar.compile_step(model, optimizer, mesh, "ddp", (ROWS, LENGTH), **how)
    tokens = torch.randint(48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    state, metrics = program.simulate(init_state(program, model.init(0)), {"tokens": tokens, "labels": tokens.roll(-1, 1)})
    return program, state, metrics["loss"]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb1p", "zbv", "dual_pipe_v"])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_bits_are_those_without(model, kind, schedule):
    """Every parameter and the loss, for whole and for split backwards."""
    mesh = Mesh(pp=2)
    _, expected, loss = stepped(model, mesh, RecomputePolicy(kind), schedule)
    program, state, same = stepped(model, mesh, RecomputePolicy(kind, offload=True), schedule)
    assert torch.equal(loss, same)
    assert all(torch.equal(value, state.leaves[path]) for path, value in expected.leaves.items())
    assert {"offload", "fetch"} <= {step.op for step in program.instructions}


def test_what_is_away_takes_no_memory_of_the_device(model):
    """With everything kept, the peak falls by what waits in the memory of the host; every value that leaves comes back."""
    kept, _, _ = stepped(model, Mesh(dp=1), RecomputePolicy("none"), "gpipe")
    away, _, _ = stepped(model, Mesh(dp=1), RecomputePolicy("none", offload=True), "gpipe")
    before, after = kept.predict(), away.predict()
    assert before.host_bytes == 0 and after.host_bytes > 0
    assert after.peak_bytes - after.state_bytes < 0.6 * (before.peak_bytes - before.state_bytes)
    ops = [step.op for step in away.instructions]
    assert ops.count("offload") == ops.count("fetch") > 0
    left = {step.outputs[0] for step in away.instructions if step.op == "offload"}
    assert left == {step.inputs[0] for step in away.instructions if step.op == "fetch"}


def test_a_fetch_is_under_way_before_its_segment_is_due(model):
    """What the next backward reads is fetched before the one that runs now."""
    program, _, _ = stepped(model, Mesh(dp=1), RecomputePolicy("full", offload=True))
    steps = [step for step in program.instructions if step.microbatch == 0]
    first = {step.segment: i for i, step in reversed(list(enumerate(steps))) if step.op == "fetch"}
    backward = {step.segment: i for i, step in enumerate(steps) if step.op == "backward"}
    for layer in (1, 2, 3):
        assert first[f"layers.{layer}"] < backward[f"layers.{layer + 1}"]
