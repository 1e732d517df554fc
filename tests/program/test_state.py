"""State that segments keep from step to step: on every mesh, in place, proved, and refused where it cannot be kept."""

from dataclasses import replace

import pytest

from mpar import Mesh, compile_eval, compile_forward, compile_step, testing
from mpar.chain import Segment
from mpar.errors import ConfigError, ProgramError
from mpar.ir import STATE, Kind
from mpar.optim import SGD
from mpar.program import Program
from tests.program.stateful import BATCHES, PARAMS, SHAPE, Stateful, expected_results, meta

MESHES = {
    "one": ({}, "ddp"),
    "tp": ({"tp": 2}, "tp"),
    "dp": ({"dp": 2}, "ddp"),
    "zero3": ({"fsdp": 2}, "zero3"),
    "pp": ({"pp": 2}, "ddp"),
    "pp_dp_tp": ({"pp": 2, "dp": 2, "tp": 2}, "tp"),
}


def compiled(mesh: str) -> Program:
    """The program of the chain on a mesh."""
    sizes, strategy = MESHES[mesh]
    return compile_forward(Stateful(), Mesh(**sizes), strategy, SHAPE)


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_on_every_mesh(mesh):
    """Three steps give what plain torch gives, from a program that went through text; the given state is not changed."""
    program = Program.from_plain(compiled(mesh).to_plain())
    state = first = program.init_state(PARAMS)
    for batch, expected in zip(BATCHES, expected_results(), strict=True):
        state, results = program.simulate(state, batch)
        for name in expected:
            testing.assert_close(results[name], expected[name], name=name)
    assert all(not leaf.any() for path, leaf in first.leaves.items() if path.startswith(STATE))


class _ManyRows(Stateful):
    """The chain with larger pools."""

    abstract_state = {**Stateful.abstract_state, "pool": [meta(2, 1000, 4, 2)] * 2}  # noqa: RUF012


def test_state_is_written_in_place():
    """A run keeps the memory of its state, and the predicted peak grows by as many bytes as the state does."""
    program = compiled("one")
    run, state = program.bind(), program.init_state(PARAMS)
    before = {path: leaf.data_ptr() for path, leaf in state.leaves.items()}
    state, _ = run(state, BATCHES[0])
    assert before == {path: leaf.data_ptr() for path, leaf in state.leaves.items()}
    larger = compile_forward(_ManyRows(), Mesh(), "ddp", SHAPE)
    sizes = [sum(program.values[leaf.value].bytes for leaf in program.state_in) for program in (program, larger)]
    assert larger.peaks()[0] - program.peaks()[0] == sizes[1] - sizes[0] > 100_000
    assert program.kinds["layers forward"].overwrites == (2, 3)


def test_state_lives_with_its_stage():
    """Along pp each position has the state of its own layers, and prints it."""
    program = compiled("pp")
    kept = [[leaf.path for leaf in part.state_in if leaf.path.startswith(STATE)] for part in program.parts]
    assert kept == [["state.mean.0", "state.pool.0"], ["state.mean.1", "state.pool.1"]]
    assert "x2.0, state.mean.0', state.pool.0' = forward layers.0 mb0" in program.text()


def _line(part, segment: str) -> int:
    return next(n for n, i in enumerate(part.instructions) if (i.op, i.segment) == ("forward", segment))


def _read_late(program: Program) -> None:
    """The next layer reads the old state of the layer before it, which has been written over."""
    part = program.parts[0]
    first, second = _line(part, "layers.0"), _line(part, "layers.1")
    old = part.instructions[first].inputs[2]
    frees = tuple(v for v in part.instructions[first].frees if v != old)
    part.instructions[first] = replace(part.instructions[first], frees=frees)
    inputs = list(part.instructions[second].inputs)
    inputs[2] = old
    frees = (*part.instructions[second].frees, old)
    part.instructions[second] = replace(part.instructions[second], inputs=tuple(inputs), frees=frees)


def _swap_results(program: Program) -> None:
    """The new states of two layers change places."""
    part = program.parts[0]
    paths = {leaf.path: leaf for leaf in part.state_out}
    a, b = paths["state.pool.0"], paths["state.pool.1"]
    swapped = {a.path: replace(a, value=b.value), b.path: replace(b, value=a.value)}
    part.state_out = [swapped.get(leaf.path, leaf) for leaf in part.state_out]


def _elsewhere(program: Program) -> None:
    """The new state lies in other memory than the old one."""
    leaf = next(leaf for leaf in program.parts[0].state_out if leaf.path == "state.pool.1")
    program.values[leaf.value] = replace(program.values[leaf.value], storage=10_000)


def _not_written(program: Program) -> None:
    """The code of a layer does not write over the rows that it returns as written."""
    kind: Kind = program.kinds["layers forward"]
    program.kinds["layers forward"] = replace(kind, overwrites=(2,))


def _old_returned(program: Program) -> None:
    """The state after the step is that before it."""
    part = program.parts[0]
    old = {leaf.path: leaf for leaf in part.state_in}
    part.state_out = [old[leaf.path] if leaf.path == "state.mean.1" else leaf for leaf in part.state_out]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_read_late, r"reads state.mean.0, over which line 0002 has written"),
        (_swap_results, r"reads the state .*pool.0'\] and makes that of .*pool.1'\]: it must replace what it reads"),
        (_elsewhere, "does not write the new state.pool.1 over the old one"),
        (_not_written, "returns the new state.pool.0 in the memory of the old one without writing there"),
        (_old_returned, "state.mean.1"),
    ],
)
def test_the_proof_refuses(spoil, why):
    """Programs that would read a state too late, or mix two up, or not replace one."""
    program = compiled("one")
    program.verify()
    spoil(program)
    with pytest.raises(ProgramError, match=why):
        program.verify()


class _Changed(Stateful):
    """The chain with other segments."""

    def __init__(self, *segments: Segment) -> None:
        self.segments = segments


def _other_shape(params, x, context, state, *, training):
    return x, (state[0][:4], state[1]), {}


def _with_loss(params, x, context, *, training):
    return {"y": x, "total": x}, {"loss": x.sum()}


def test_chains_that_are_refused():
    """State of two segments or of none, state that changes its shape, a loss beside state, gradients through state."""
    first, zero, one, last = Stateful.segments
    twice = _Changed(first, zero, replace(one, state=zero.state), last)
    with pytest.raises(ConfigError, match=r"state mean.0 is replaced by the segments .*'layers.1'\](.|\n)*state mean.1"):
        compile_forward(twice, Mesh(), "ddp", SHAPE)
    nowhere = _Changed(first, zero, one, replace(last, state=("cache",)))
    with pytest.raises(ConfigError, match="segment 'head' keeps state at 'cache', where there is none"):
        compile_forward(nowhere, Mesh(), "ddp", SHAPE)
    other = _Changed(first, zero, replace(one, fn=_other_shape), last)
    with pytest.raises(ConfigError, match=r"leaf 0 of the state that it returns is torch.float64 \(4,\)"):
        compile_forward(other, Mesh(), "ddp", SHAPE)
    with pytest.raises(ConfigError, match="computes none"):
        compile_forward(_Changed(first, zero, one, replace(last, fn=_with_loss)), Mesh(), "ddp", SHAPE)
    for compile_losses in (
        lambda chain: compile_eval(chain, Mesh(), "ddp", SHAPE),
        lambda chain: compile_step(chain, SGD(lr=0.1), Mesh(), "ddp", SHAPE),
    ):
        with pytest.raises(ConfigError, match="keep state from step to step"):
            compile_losses(Stateful())
