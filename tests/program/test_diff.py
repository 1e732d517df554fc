"""What changes between two programs, as people read it."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, diff
from mpar.program.compile import compile_step

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def compiled(mesh: Mesh, strategy: str, **how) -> Program:
    model = models.from_config(CONFIG, vocab_multiple=1)
    return compile_step(model, AdamW(lr=1e-3), mesh, strategy, (8, 8), num_microbatches=4, **how)


@pytest.fixture(scope="module")
def one() -> Program:
    return compiled(Mesh(pp=2), "ddp")


def test_a_program_equals_itself(one):
    """Two compilations of one configuration do not differ; nor does other hardware, which only changes predicted times."""
    found = diff(one, compiled(Mesh(pp=2), "ddp"))
    assert not found.hunks
    assert not found.added
    assert not found.removed
    assert found.peak_bytes == (one.predict().peak_bytes,) * 2


def test_numbers_do_not_matter(one):
    """Other numbers of messages and other names of values are no difference; another peer is."""
    renumbered = [
        replace(
            part, instructions=[replace(step, message=step.message + 100 * (step.message >= 0)) for step in part.instructions]
        )
        for part in one.parts
    ]
    values = [replace(value, name=f"v{number}") for number, value in enumerate(one.values)]
    assert not diff(one, replace(one, parts=renumbered, values=values)).hunks
    last = replace(one.parts[0], instructions=[replace(step, peer=step.peer * 2) for step in one.parts[0].instructions])
    assert set(diff(one, replace(one, parts=[last, one.parts[1]])).added) == {"send", "recv", "wait"}


@pytest.mark.parametrize(
    ("mesh", "strategy", "how"),
    [
        (Mesh(pp=2), "ddp", {"schedule": "zbv"}),
        (Mesh(), "ddp", {}),
        (Mesh(pp=2, fsdp=2), "zero3", {}),
        (Mesh(pp=2), "ddp", {"recompute": "full"}),
    ],
    ids=["schedule", "pp", "strategy", "recompute"],
)
def test_hunks_turn_one_program_into_the_other(one, mesh, strategy, how):
    """What is added and what is removed is the difference of the programs, op by op and line by line."""
    other = compiled(mesh, strategy, **how)
    found = diff(one, other, context=1_000_000)
    assert found.hunks
    before, after = (Counter(step.op for step in program.instructions) for program in (one, other))
    assert {op: n for op in {*before, *after} if (n := after[op] - before[op])} == {
        op: n for op in {*found.added, *found.removed} if (n := found.added.get(op, 0) - found.removed.get(op, 0))
    }
    for hunk in found.hunks:
        for program, sign in ((one, "-"), (other, "+")):
            steps = program.parts[hunk.position].instructions if hunk.position < len(program.parts) else []
            shown = [line[10:].split()[0] for line in hunk.lines if line[0] in f" {sign}"]
            assert shown == [step.op for step in steps]


def test_summary_counts_what_is_sent(one):
    """Bytes of collectives and messages are those that the programs themselves count, and only what differs is shown."""
    other = compiled(Mesh(pp=2), "ddp", schedule="interleaved")
    found = diff(one, other)
    for side, program in enumerate((one, other)):
        messages = [step for step in program.instructions if step.op == "send"]
        size = sum(program.values[step.inputs[0]].bytes for step in messages)
        assert found.collectives["send", "pp"][side] == (len(messages), size)
    text = found.summary()
    assert re.search(r"send pp +\d+ \(.*\) -> \d+ \(", text)
    assert "all_reduce" not in text
    assert "peak memory" in text


def test_text_is_shortened(one):
    """With a bound the screen gets the first lines and the number of those left out."""
    found = diff(one, compiled(Mesh(pp=2), "ddp", schedule="zbv"))
    whole, short = found.text(), found.text(5)
    assert short.startswith(found.summary())
    assert "more lines of" in short
    assert len(whole.splitlines()) > len(short.splitlines())
    assert len(short.splitlines()) == len(found.summary().splitlines()) + 1 + 5 + 1
