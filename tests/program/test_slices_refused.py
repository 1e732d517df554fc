"""Slices that would be wrong: programs that the proof refuses, and what cannot be compiled."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models
from mpar.chain import Chain
from mpar.compiler.build._passes import insert_frees
from mpar.errors import ConfigError, MparError, ProgramError, ShapeError
from mpar.ir import Piece
from mpar.program import Instruction, Program
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.program.oracle import BASE, MOE, Recorder

QWEN3 = {**BASE, "model_type": "qwen3"}
WINDOW = {"model_type": "mistral", "sliding_window": 3}
Steps = list[Instruction]


@functools.cache
def make_program(schedule: str | None = None, num_microbatches: int = 1, *, window: bool = False) -> Program:
    """A step of two layers in four slices of four positions; schedule: on two stages."""
    config = {**BASE, **WINDOW} if window else QWEN3
    model = models.from_config(config, dtype=torch.float64, vocab_multiple=8)
    mesh, how = Mesh(pp=2) if schedule else Mesh(), {"schedule": schedule, "num_microbatches": num_microbatches}
    return compile_step(model, Recorder(), mesh, "ddp", (num_microbatches, 16), num_slices=4, **how)


def spoiled(program: Program, position: int, steps: Steps) -> Program:
    """The program with other instructions at one position along pp, where values are freed when they were last read."""
    part = program.parts[position]
    kept = {leaf.value for leaf in (*part.state_out, *part.metrics, *part.batch, *part.scalars)}
    parts = [*program.parts]
    parts[position] = replace(part, instructions=insert_frees(steps, kept))
    return replace(program, parts=parts)


def reading(step: Instruction, values: dict[int, int]) -> Instruction:
    """The instruction with other operands."""
    return replace(step, inputs=tuple(values.get(v, v) for v in step.inputs))


def find(steps: Steps, op: str, segment: str, piece: int, num_slices: int = 4) -> int:
    """The line of an instruction."""
    microbatch, c = divmod(piece, num_slices)
    (line,) = (
        i
        for i, step in enumerate(steps)
        if (step.op, step.segment, step.microbatch, max(step.slice, 0)) == (op, segment, microbatch, c)
    )
    return line


def sums_of_carried(program: Program, part) -> Iterator[tuple[Instruction, int, int]]:
    """(reader, sum of gradients of what a slice carried over, one of its terms) for every sum and its reader."""
    for sum_ in part.instructions:
        if sum_.op != "accumulate" or not program.values[sum_.outputs[0]].name.startswith("dcarried"):
            continue
        half = len(sum_.outputs)
        for reader in part.instructions:
            for n, value in enumerate(sum_.outputs):
                if value in reader.inputs and reader.op != "accumulate":
                    yield reader, value, sum_.inputs[n]
                    yield reader, value, sum_.inputs[half + n]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("schedule", [None, "zb_h1"])
def test_a_lost_gradient_of_what_was_left_is_refused(schedule, num_microbatches):
    """Whoever reads one term of a sum of gradients of keys or values instead of the sum: halves of a backward too."""
    program, readers = make_program(schedule, num_microbatches), set()
    assert spoiled(program, 0, program.parts[0].instructions) == program
    for position, part in enumerate(program.parts):
        for reader, value, term in sums_of_carried(program, part):
            steps = [reading(step, {value: term}) if step is reader else step for step in part.instructions]
            with pytest.raises(ProgramError, match=r"gradients of what it carried|unlike that of the same segment"):
                spoiled(program, position, steps).verify()
            readers.add(reader.op)
    assert readers == ({"backward_input", "backward"} if schedule else {"backward"})  # the first stage's is whole


def test_what_another_microbatch_left_is_refused():
    """A forward that reads keys of another microbatch."""
    program = make_program(num_microbatches=2)
    steps = program.parts[0].instructions
    left = {(made.segment, made.piece, made.index): value for value, made in program.parts[0].carried.items()}
    for n in range(2):
        line = find(steps, "forward", "layers.0", 4 + 2)
        changed = reading(steps[line], {left["layers.0", Piece(1, 1), n]: left["layers.0", Piece(0, 1), n]})
        assert changed != steps[line]
        with pytest.raises(ProgramError, match="which belongs to another microbatch"):
            spoiled(program, 0, [*steps[:line], changed, *steps[line + 1 :]]).verify()


@pytest.mark.parametrize("what", ["carried1.", "order.mb"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_past_slices_in_another_order_are_refused(op, what):
    """Keys, or positions, of two past slices that change places."""
    program = make_program()
    steps = program.parts[0].instructions
    line = find(steps, op, "layers.0", 3)
    a, b = ([v for v in steps[line].inputs if program.values[v].name == f"{what}0.{c}"] for c in (0, 1))
    assert len(a) == len(b) > 0
    changed = reading(steps[line], dict(zip(a + b, b + a, strict=True)))
    with pytest.raises(ProgramError, match="in the order of the slices"):
        spoiled(program, 0, [*steps[:line], changed, *steps[line + 1 :]]).verify()


def test_what_a_later_slice_left_is_refused():
    """A forward that comes behind that of a later slice and reads what this one left."""
    program = make_program(window=True)
    steps = program.parts[0].instructions
    left = {(made.segment, made.piece, made.index): value for value, made in program.parts[0].carried.items()}
    first, second = (find(steps, "forward", "layers.0", piece) for piece in (1, 2))
    early = reading(steps[second], {left["layers.0", Piece(0, 1), n]: left["layers.0", Piece(0, 0), n] for n in range(2)})
    late = reading(steps[first], {left["layers.0", Piece(0, 0), n]: left["layers.0", Piece(0, 2), n] for n in range(2)})
    assert early != steps[second] and late != steps[first]
    moved = [*steps[:first], *steps[first + 1 : second], early, late, *steps[second + 1 :]]
    with pytest.raises(ProgramError, match="which belongs to a later slice"):
        spoiled(program, 0, moved).verify()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("op", "operands"), [("backward", "dx2."), ("backward", "x1."), ("forward", "x1.")])
def test_operands_of_another_slice_are_refused(op, operands, num_microbatches):
    """Two slices that exchange the gradients of what they gave, or their inputs."""
    program = make_program(num_microbatches=num_microbatches)
    steps = program.parts[0].instructions
    lines = [find(steps, op, "layers.0", piece) for piece in (1, 2)]
    a, b = (next(v for v in steps[line].inputs if program.values[v].name.startswith(operands)) for line in lines)
    changed = {line: reading(steps[line], {a: b, b: a}) for line in lines}
    with pytest.raises(ProgramError, match=r"belongs to (another|a later) slice"):
        spoiled(program, 0, [changed.get(line, step) for line, step in enumerate(steps)]).verify()


@pytest.mark.parametrize("schedule", [None, "zb_h1"])
def test_exchanged_backwards_are_refused(schedule):
    """A slice whose backward comes before that of a later slice, in its place or in its name."""
    program = make_program(schedule)
    steps = program.parts[0].instructions
    op = "backward_input" if schedule and "backward_input" in {step.op for step in steps} else "backward"
    segment = "layers.0"
    a, b = (find(steps, op, segment, piece) for piece in (2, 1))
    places = {a: steps[b], b: steps[a]}
    names = {a: replace(steps[a], slice=steps[b].slice), b: replace(steps[b], slice=steps[a].slice)}
    for changed in (places, names):
        with pytest.raises(ProgramError):
            spoiled(program, 0, [changed.get(line, step) for line, step in enumerate(steps)]).verify()


class Plain(Chain):
    """A chain that does not say whether its rows can be cut: it has all that a chain must have, and nothing else."""

    def __init__(self, model: models.Model) -> None:
        self.model = model

    segments = property(lambda self: self.model.segments)
    abstract_params = property(lambda self: self.model.abstract_params)
    param_axes = property(lambda self: self.model.param_axes)
    batch_axes = property(lambda self: self.model.batch_axes)

    def context(self, batch, row_length=None):
        return self.model.context(batch, row_length)

    def weight(self, batch):
        return self.model.weight(batch)


GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12}
POSITIONS = {key: ((4, 16), torch.int64) for key in ("tokens", "labels", "positions")}
DYNAMIC = {**BASE, "model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
RING = replace(preset("ddp"), context_parallel="ring", sequence="zigzag")
ROUTERS = "cannot cut the rows(?s:.*)its routers look at all tokens of a microbatch, because of {}(?s:.*)Use routers .* without"
CASES = {
    "rows": (QWEN3, {}, {"num_slices": 3}, ShapeError, "cannot cut rows of 16 positions into 3 equal slices"),
    "none": (QWEN3, {}, {"num_slices": 0}, ShapeError, "cannot cut rows of .* into 0 equal slices"),
    "a fraction": (QWEN3, {}, {"num_slices": 2.0}, ShapeError, "cannot cut rows of .* into 2.0 equal slices"),
    "ranks": (
        QWEN3,
        {},
        {"num_slices": 4, "mesh": Mesh(cp=4), "strategy": RING},
        ShapeError,
        "of 16 positions: 4 ranks .*each of the 4 slices",
    ),
    "dynamic": (DYNAMIC, {}, {"batch_shape": POSITIONS}, ConfigError, "depends on the last position of a row(?s:.*)num_slices=1"),
    "learned": (GPT2, {}, {}, ShapeError, "cannot read rows of 16 tokens: this model has learned 12 positions"),
    "capacity": (MOE, {"capacity_factor": 1.0}, {}, ConfigError, ROUTERS.format("capacity_factor")),
    "aux_loss": (MOE, {"aux_loss": 0.1}, {}, ConfigError, ROUTERS.format("aux_loss")),
    "seq_aux_loss": (MOE, {"seq_aux_loss": 0.1}, {}, ConfigError, ROUTERS.format("seq_aux_loss")),
    "z_loss": (MOE, {"z_loss": 0.1}, {}, ConfigError, ROUTERS.format("z_loss")),
    "sinkhorn": (MOE, {"kind": "sinkhorn"}, {}, ConfigError, ROUTERS.format("kind=sinkhorn")),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """With the facts that disagree and the ways out, before anything runs."""
    config, router, options, error, message = CASES[case]
    model = models.from_config(config, dtype=torch.float64, vocab_multiple=8, router=router or None)
    options = {"mesh": Mesh(), "strategy": "ddp", "batch_shape": (4, 16), "num_slices": 2, **options}
    assert issubclass(error, MparError)
    with pytest.raises(error, match=message):
        compile_step(model, Recorder(), **options)


def test_a_chain_must_say_that_its_rows_can_be_cut():
    """A chain of one's own is cut only where it says so; without slices it need not."""
    chain = Plain(models.from_config(QWEN3, dtype=torch.float64, vocab_multiple=8))
    with pytest.raises(ConfigError, match=r"what its segments carry(?s:.*)\(forbids_slices\)(?s:.*)num_slices=1 "):
        compile_step(chain, Recorder(), Mesh(), "ddp", (4, 16), num_slices=2)
    assert compile_step(chain, Recorder(), Mesh(), "ddp", (4, 16)).num_slices == 1
