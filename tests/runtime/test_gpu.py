"""Programs on a GPU: kernels, streams, recorded steps and memory, against the same program elsewhere."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models, testing, tree
from mpar.ir import HOME
from mpar.kernels import Kernels, kernels_for
from mpar.optim import AdamW
from mpar.program import RankRun, Replay, State
from mpar.program.compile import compile_step
from mpar.runtime import ALONE
from mpar.runtime import _rank_run as runtime

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
DEVICE = "cuda"


def make(kernels, precision="fp32", *, microbatches=2, length=512, chunk=None):
    """A model and a step of it."""
    model = models.from_config(CONFIG, dtype=torch.float32, logits_chunk=chunk)
    shape = (4, length)
    how = {"num_microbatches": microbatches, "precision": precision, "kernels": kernels}
    return model, compile_step(model, AdamW(lr=1e-3), Mesh(), "ddp", shape, **how)


def state_of(program, model, device):
    """A fresh state."""
    state = program.init_state(model.init(0))
    return State({path: leaf.to(device, copy=True) for path, leaf in state.leaves.items()})


def batch_of(seed, device, length=512):
    """Tokens and labels."""
    tokens = torch.randint(0, 4096, (4, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1].contiguous().to(device), "labels": tokens[:, 1:].contiguous().to(device)}


def train(run, state, steps, device):
    """Losses and norms of some steps, and the state after them."""
    out = []
    for seed in range(steps):
        state, metrics = run(state, batch_of(seed, device))
        out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return out, state


@pytest.mark.parametrize("chunk", [None, 8192], ids=["logits", "fused_head"])
def test_kernels_train_as_references_do(chunk):
    """Three float32 steps on the GPU, by Triton's kernels where they take float32, follow the references on the CPU."""
    model, program = make(kernels_for("auto", DEVICE), chunk=chunk)
    expected, _ = train(RankRun(program, ALONE, "cpu"), state_of(program, model, "cpu"), 3, "cpu")
    actual, _ = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 3, DEVICE)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_bfloat16_steps_are_deterministic_and_close():
    """bfloat16 steps have the same bits in a second run, and losses within its rounding of float32."""
    model, program = make(kernels_for("auto", DEVICE), "bf16")
    first, state = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 3, DEVICE)
    second, again = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 3, DEVICE)
    assert first == second
    assert all(torch.equal(leaf, again.leaves[path]) for path, leaf in state.leaves.items())
    model, wide = make(Kernels("torch"))
    exact, _ = train(wide.bind(device=DEVICE), state_of(wide, model, DEVICE), 3, DEVICE)
    for ours, theirs in zip(first, exact, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=2e-3)


def test_recorded_steps_are_the_steps():
    """A CUDA graph of the step gives the bits of the step, with new batches and a changing learning rate."""
    model, program = make(kernels_for("auto", DEVICE), "bf16")
    expected, end = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 5, DEVICE)
    run = program.bind(device=DEVICE, execution="cuda_graph")
    assert isinstance(run, Replay)
    actual, state = train(run, state_of(program, model, DEVICE), 5, DEVICE)
    assert actual == expected
    assert all(torch.equal(leaf, state.leaves[path]) for path, leaf in end.leaves.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_computes_the_same():
    """Inductor's code gives losses within bfloat16's rounding."""
    model, program = make(kernels_for("auto", DEVICE), "bf16")
    expected, _ = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 2, DEVICE)
    actual, _ = train(program.bind(device=DEVICE, execution="inductor"), state_of(program, model, DEVICE), 2, DEVICE)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)


def test_streams_change_nothing(monkeypatch):
    """Each segment on the stream of another queue, ordered by events alone, gives the bits of one stream."""
    model, program = make(kernels_for("auto", DEVICE), "bf16", microbatches=4)
    expected, end = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 4, DEVICE)
    plan, spread = runtime.plan_streams, ("left", "right", HOME)

    def scattered(instructions, values, kinds):
        moved = [replace(step, queue=spread[line % 3]) for line, step in enumerate(instructions)]
        talking = {name: replace(kind, collectives=("pretended",)) for name, kind in kinds.items()}
        return plan(moved, values, talking)

    monkeypatch.setattr(runtime, "plan_streams", scattered)
    actual, state = train(program.bind(device=DEVICE), state_of(program, model, DEVICE), 4, DEVICE)
    assert actual == expected
    assert all(torch.equal(leaf, state.leaves[path]) for path, leaf in end.leaves.items())


@pytest.mark.parametrize("chunk", [None, 8192], ids=["logits", "fused_head"])
def test_memory_is_as_predicted(chunk):
    """The allocator's peak is within 3 % of what was predicted to be needed."""
    model, program = make(kernels_for("auto", DEVICE), "bf16", microbatches=1, length=2048, chunk=chunk)
    run, state = program.bind(device=DEVICE), state_of(program, model, DEVICE)
    batch = batch_of(0, DEVICE, 2048)
    state, _ = run(state, batch)
    before = torch.cuda.memory_allocated()
    held = sum(leaf.nbytes for leaf in state.leaves.values()) + sum(rows.nbytes for rows in batch.values())
    torch.cuda.reset_peak_memory_stats()
    state, _ = run(state, batch)
    prediction = program.predict()
    foreign = before - held  # cuBLAS's workspace and what else libraries keep
    measured = torch.cuda.max_memory_allocated() - foreign
    assert prediction.need_bytes == pytest.approx(measured, rel=0.03)


def test_ops_called_alone_take_kernels(make_model):
    """The loss by eager ops on the GPU is the CPU's."""
    model = make_model(torch.float32, head_dim=64, hidden_size=128)
    params = model.init(0)
    tokens = torch.arange(32).view(2, 16) % 96
    batch = {"tokens": tokens, "labels": tokens}
    moved = tree.map_leaves(lambda x: x.to(DEVICE), params)
    expected, _ = model.loss(params, batch)
    actual, _ = model.loss(moved, {key: rows.to(DEVICE) for key, rows in batch.items()})
    testing.assert_close(actual.cpu(), expected, rtol=1e-4)
