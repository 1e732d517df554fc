"""Predicted memory against storages counted by weak references in a dispatch mode."""

import pytest
import torch

from mpar.compiler import RecomputePolicy
from mpar.forecast._memory import pools
from mpar.ir import queues_on_streams
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES
from mpar.optim import AdamW
from mpar.program import RankRun, State, batch_rows
from mpar.program.compile import compile_step
from mpar.runtime.comm._lockstep import run_ranks
from mpar.shards import shard
from tests.compiler.box import BOX
from tests.forecast.storage_tracker import PoolTracker, StorageTracker, TrackedComm

OPS = {name: primitive.op for name, primitive in PRIMITIVES.items()}  # through the dispatcher: one op each to the tracker
STRATEGIES = [
    (Mesh(dp=2), "ddp"),
    (Mesh(fsdp=2), "zero1"),
    (Mesh(fsdp=2), "zero2"),
    (Mesh(dp=2, fsdp=2), "hsdp"),
    (Mesh(tp=2), "tp"),
    (Mesh(fsdp=2, tp=2), "zero3_tp_sp"),
]
POLICIES = [
    RecomputePolicy("none"),
    RecomputePolicy("full"),
    RecomputePolicy("selective"),
    RecomputePolicy("budget", budget=9000),
]


def trackers(program, state, batch, make=StorageTracker):
    """What watched the storages of each simulated rank during one step."""

    def work(rank, comm):
        tracker = make()
        local = {leaf.path: shard(state.leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in program.state_in}
        rows = batch_rows(program, batch, rank)
        run = RankRun(program, TrackedComm(comm, tracker), primitives=OPS, progress=tracker.follow)
        tracker.add([*local.values(), *rows.values(), *(c for k in program.kinds.values() for c in k.constants.values())])
        with tracker:
            run(State(local, state.step), rows)
        return tracker

    return run_ranks(program.mesh, work)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize(("mesh", "strategy"), STRATEGIES, ids=str)
def test_peak_is_exact(mesh, strategy, policy, make_model, make_state, batch):
    """The predicted peak of every rank is the number of bytes that a run holds at its fullest, to the byte."""
    model, optimizer = make_model(torch.float32), AdamW(lr=1e-3)
    program = compile_step(model, optimizer, mesh, strategy, (8, 8), num_microbatches=2, recompute=policy)
    state = make_state(model, optimizer)
    assert [tracker.peak for tracker in trackers(program, state, batch)] == [program.predict().peak_bytes] * mesh.size


@pytest.mark.parametrize(("mesh", "strategy"), STRATEGIES, ids=str)
def test_pools_are_exact(mesh, strategy, make_model, make_state, batch):
    """The predicted peak of every queue's memory, to the byte, of a program that is ordered for hardware that overlaps."""
    model, optimizer = make_model(torch.float32, num_hidden_layers=4), AdamW(lr=1e-3)
    program = compile_step(model, optimizer, mesh, strategy, (8, 8), num_microbatches=2, hardware=BOX, bucket_bytes=0)
    queues = queues_on_streams(program.parts[0].instructions, program.kinds)
    expected = pools(program, program.parts[0])
    assert (len(expected) > 1) == (strategy != "tp")
    assert program.predict().reserved_bytes == sum(expected.values()) >= program.predict().peak_bytes
    for tracker in trackers(program, make_state(model, optimizer), batch, lambda: PoolTracker(queues)):
        assert dict(tracker.peaks) == expected and tracker.peak == program.predict().peak_bytes


@pytest.mark.parametrize(("mesh", "strategy"), STRATEGIES, ids=str)
def test_policies_change_no_bit(mesh, strategy, make_model, make_state, batch):
    """Loss, gradient norm and updated parameters are the same bits whatever is recomputed, and recomputing saves memory."""
    batch = {key: value.repeat(1, 8) for key, value in batch.items()}  # long enough for activations to dominate
    model, optimizer = make_model(torch.float32), AdamW(lr=1e-3)
    results, peaks = [], {}
    for policy in POLICIES:
        program = compile_step(model, optimizer, mesh, strategy, (8, 64), num_microbatches=2, recompute=policy)
        state, metrics = program.simulate(make_state(model, optimizer), batch)
        results.append([*state.leaves.values(), metrics["loss"], metrics["grad_norm"]])
        peaks[policy.kind] = program.predict().peak_bytes
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert peaks["budget"] < peaks["none"]
