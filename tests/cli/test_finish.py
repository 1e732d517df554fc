"""What follows a finished run."""

import pytest

from mpar.cli._compose import compose_config
from mpar.cli._finish import _questions
from mpar.train import TrainConfig


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ([], "Who are you?"),
        (["data.sources=[self-cognition#10,mine.jsonl]"], "Who are you?"),
        (["data.sources=[mine.jsonl]"], None),
        (["task.chat=[Really?]", "data.sources=[mine.jsonl]"], "Really?"),
        (["task.chat=[]"], None),
    ],
)
def test_questions_are_about_the_sample_data(overrides, first):
    """A model that learned other data is asked nothing, unless `task.chat` has questions."""
    asked = _questions(compose_config("train", TrainConfig, overrides)[0])
    assert (asked[0] if asked else None) == first
