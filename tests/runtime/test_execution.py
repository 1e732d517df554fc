"""Ways to execute a program: recorded and replayed, and through Inductor, against plain execution."""

from dataclasses import replace

import pytest
import torch
from torch._inductor import config as inductor_config

from mpar import Mesh, testing
from mpar.compiler import policy
from mpar.errors import ConfigError, UnknownNameError
from mpar.optim import AdamW, Cosine
from mpar.program import RankRun, Replay, State
from mpar.program.compile import compile_step
from mpar.runtime import ALONE


@pytest.fixture
def program(make_model):
    """A step of two microbatches whose learning rate changes with the step."""
    return compile_step(
        make_model(torch.float32), AdamW(lr=Cosine(lr=1e-2, total_steps=10)), Mesh(), "ddp", (8, 8), num_microbatches=2
    )


def losses(run, state, batches):
    """What every step says, and the state at the end."""
    out = []
    for batch in batches:
        state, metrics = run(state, batch)
        out.append([float(metrics[key]) for key in ("loss", "grad_norm", "lr")])
    return out, state


def the_work(work, given):
    """A recording that is none."""
    return lambda: work() is None


def copy(state):
    """A state of its own."""
    return State({path: leaf.clone() for path, leaf in state.leaves.items()}, state.step)


def test_replay_is_the_run(program, make_state, make_model, batch):
    """Steps with fixed memory give the bits of plain steps: losses, norms, rates and state, with a new batch each time."""
    state = make_state(make_model(torch.float32))
    batches = [{key: value.roll(shift, 0) for key, value in batch.items()} for shift in range(5)]
    expected, end = losses(RankRun(program, ALONE), copy(state), batches)
    actual, replayed = losses(Replay(RankRun(program, ALONE), capture=the_work), copy(state), batches)
    assert actual == expected
    assert replayed.step == end.step == 5
    for path, leaf in end.leaves.items():
        assert torch.equal(replayed.leaves[path], leaf), path


def test_replay_takes_a_state_from_elsewhere(program, make_state, make_model, batch):
    """After a checkpoint is loaded the fixed tensors hold it, and metrics given out before do not change."""
    state = make_state(make_model(torch.float32))
    run = Replay(RankRun(program, ALONE), capture=the_work)
    first, metrics = run(copy(state), batch)
    second, again = run(copy(state), batch)
    kept = float(again["loss"])
    third, more = run(copy(state), batch)
    assert float(metrics["loss"]) == kept == float(more["loss"]) == float(again["loss"])
    assert all(torch.equal(leaf, first.leaves[path]) for path, leaf in third.leaves.items())
    assert all(leaf is second.leaves[path] for path, leaf in third.leaves.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_inductor_computes_the_same(program, make_state, make_model, batch):
    """Code that Inductor compiled gives the step up to rounding."""
    state = make_state(make_model(torch.float32))
    expected, end = losses(RankRun(program, ALONE), copy(state), [batch] * 2)
    actual, compiled = losses(RankRun(program, ALONE, inductor=True), copy(state), [batch] * 2)
    for ours, plain in zip(actual, expected, strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)
    for path, leaf in end.leaves.items():
        testing.assert_close(compiled.leaves[path], leaf, name=path, rtol=1e-3)  # Adam's first steps divide by tiny roots


def test_impossible_executions_are_refused(program):
    """A name that is none, and graphs where there is no GPU."""
    with pytest.raises(UnknownNameError, match="eager, inductor, cuda_graph"):
        program.bind(execution="fast")
    with pytest.raises(ConfigError, match=r"execution='cuda_graph' on device cpu.*Use eager or inductor"):
        program.bind(execution="cuda_graph")


def test_inductor_needs_a_compiler(program):
    """Without one the error says so before anything runs, and what to do."""
    without = inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})  # monkeypatch would leave the entry out afterwards
    with without, pytest.raises(ConfigError, match=r"there is no C\+\+ compiler.*Install g\+\+.*execution='eager'"):
        program.bind(execution="inductor")


def test_a_step_that_offloads_is_not_recorded(make_model):
    """Copies to the host go to other addresses in each step."""
    offload = replace(policy("full"), offload=True)
    program = compile_step(make_model(), AdamW(lr=1e-3), Mesh(), "ddp", (8, 8), recompute=offload)
    with pytest.raises(ConfigError, match=r"copied to the memory of the host.*Use recompute.offload=false"):
        program.bind(device="cuda", execution="cuda_graph")
