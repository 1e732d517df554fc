"""The line of a step, on terminals of any width and where there is none."""

import io

import pytest
from rich.console import Console

from mpar.cli import _screen
from mpar.cli._screen import StepProgress, Word, fitted
from mpar.train import StepRecord

WORDS = [Word("step 3/200"), Word("━━━━", 9), Word("loss 2.1234", 1), Word("", 8), Word("lr 0.001", 5), Word("norm 2.3", 6)]


def record(step: int, **others: float) -> StepRecord:
    return StepRecord(step, 2.125, 0.5, 0.0003, 1, 1.0, 1234.0, 1234.0, 1.0, 1.0, 1, 1, 1, **others)


def test_what_matters_last_is_left_out_first():
    """The bar goes before the norm, the rate and the loss; the step stays, and nothing is wider than the terminal."""
    lines = {width: fitted(WORDS, width) for width in range(1, 60)}
    assert all(len(line) <= width for width, line in lines.items())
    assert lines[59] == "step 3/200  ━━━━  loss 2.1234  lr 0.001  norm 2.3"
    assert lines[44] == "step 3/200  loss 2.1234  lr 0.001  norm 2.3"
    assert lines[36] == "step 3/200  loss 2.1234  lr 0.001"
    assert lines[25] == "step 3/200  loss 2.1234"
    assert lines[12] == "step 3/200"


@pytest.mark.parametrize(
    ("log_every", "steps"), [(None, [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]), (7, [7, 14]), (1, list(range(1, 21)))]
)
def test_lines_of_a_run(log_every, steps, capsys):
    """Without a terminal there are about ten lines, or one after every `log_every` steps, each with rate and norm."""
    with StepProgress(0, 20, shown=True, log_every=log_every) as progress:
        for step in range(1, 21):
            progress(record(step))
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == steps
    assert all("loss 2.1250  lr 0.0003  norm 0.5  1,234 tokens/s" in line for line in lines)


def test_nothing_is_shown_unless_asked(capsys):
    """`progress=false` leaves steps out."""
    with StepProgress(0, 2, shown=False) as progress:
        progress(record(1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("width", [200, 30])
def test_a_terminal_keeps_the_step(width, monkeypatch):
    """On a terminal one line changes; a narrow one still has step and loss."""
    screen = io.StringIO()
    monkeypatch.setattr(_screen, "Console", lambda **_: Console(file=screen, force_terminal=True, width=width))
    with StepProgress(0, 4, shown=True) as progress:
        for step in (1, 2, 3, 4):
            progress(record(step, eval_loss=2.0 if step == 2 else None))
    text = screen.getvalue()
    assert all(f"step {step}/4" in text and "loss 2.1250" in text for step in (1, 2, 3, 4))
    assert ("━" in text, "eval 2.0000" in text) == (width == 200, width == 200)
