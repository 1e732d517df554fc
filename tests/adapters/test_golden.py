"""Golden tables: what a step with adapters sends, keeps and holds, beside a step that trains all parameters.

After a change that is meant, write them again with `python -m tests.adapters.test_golden` and read the diff.
"""

import pathlib
from collections import Counter

import pytest
import torch

from mpar import Mesh, adapters, models
from mpar.adapters import LoRA
from mpar.optim import AdamW
from mpar.program import Program, State
from mpar.program.compile import compile_step
from mpar.quantised import quantise
from tests.adapters.kinds import LLAMA, WIDER
from tests.forecast.test_prediction import measured_peaks, predicted_peaks, random_batch

HERE = pathlib.Path(__file__).with_name("golden")
CASES = {"zero3_fsdp2": (Mesh(fsdp=2), "zero3"), "tp_sp_tp2": (Mesh(tp=2), "tp_sp")}
MODELS = {
    "all parameters": lambda model: model,
    "lora": lambda model: adapters.add(model, LoRA(rank=4)),
    "lora beside nf4": lambda model: quantise(adapters.add(model, LoRA(rank=4)), "nf4"),
}
SHAPE = (4, 32)


def programs(case: str) -> dict[str, Program]:
    """The step of every model of a case."""
    mesh, strategy = CASES[case]
    model = models.from_config({**LLAMA, **WIDER, "vocab_size": 96}, vocab_multiple=8)
    return {name: compile_step(make(model), AdamW(lr=1e-3), mesh, strategy, SHAPE) for name, make in MODELS.items()}


def messages(program: Program) -> Counter[str]:
    """How many bytes a rank gives to collectives, by the op of the instruction and the collective."""
    sent: Counter[str] = Counter()
    for instruction in program.parts[0].instructions:
        for use in program.kinds[instruction.kind].collectives:
            sent[f"{instruction.op}: {use.op} over {' '.join(use.axes)}"] += use.bytes
    return sent


def table(made: dict[str, Program]) -> str:
    """A line for each sort of message, for what is kept of the optimizer, and for the predicted peak."""
    columns = []
    for program in made.values():
        slots = sum(program.values[leaf.value].bytes for leaf in program.parts[0].state_in if leaf.path.startswith("opt."))
        columns.append(messages(program) + Counter({"state of the optimizer": slots, "predicted peak": max(program.peaks())}))
    names = sorted({name for column in columns for name in column})
    width = max(map(len, names))
    lines = [f"{'bytes of a rank':{width}}" + "".join(f"{name:>18}" for name in made)]
    lines += [f"{name:{width}}" + "".join(f"{column[name]:>18,}" for column in columns) for name in names]
    return "\n".join(lines) + "\n"


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_messages_are_as_they_were(case):
    """With adapters no forward or backward sends more, and gradients and slots are those of the adapters alone."""
    made = programs(case)
    assert table(made) == (HERE / f"{case}.txt").read_text()
    entire, *others = (messages(program) for program in made.values())
    for program, sent in zip(list(made.values())[1:], others, strict=True):
        trained = [leaf for leaf in program.parts[0].state_in if leaf.path.startswith("params.adapters.")]
        slots = [leaf for leaf in program.parts[0].state_in if leaf.path.startswith("opt.")]
        assert {leaf.path.split(".", 2)[2] for leaf in slots} == {leaf.path.removeprefix("params.") for leaf in trained}
        assert all(sent[name] <= entire[name] for name in sent if name.startswith(("forward", "backward")))


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_peaks_are_exact(case):
    """The predicted peak of every rank is what a run holds, to the byte."""
    for program in programs(case).values():
        leaves = {leaf.path: leaf for part in program.parts for leaf in part.state_in}
        state = State({path: torch.zeros(leaf.shape, dtype=leaf.dtype) for path, leaf in leaves.items()})
        assert measured_peaks(program, state, random_batch(program)) == predicted_peaks(program)


if __name__ == "__main__":
    for name in CASES:
        (HERE / f"{name}.txt").write_text(table(programs(name)))
