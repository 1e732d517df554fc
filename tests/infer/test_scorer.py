"""The lengths of the programs that score texts."""

import pytest
import torch

from mpar import models
from mpar.errors import ConfigError
from mpar.infer._scorer import Scorer
from tests.models.variants import KINDS


class Compiled(Exception):
    """In place of a program."""


def test_a_text_of_the_full_length_fits_programs_that_ranks_divide():
    """Lengths are multiples of what divides them, and none is shorter than a text that is allowed."""
    lengths = []

    def compile_scores(chain):
        lengths.append(chain.length)
        raise Compiled

    model = models.build("llama", KINDS["llama"].base)
    scorer = Scorer(model, 100, 3, 1, compile_scores, bind=lambda program: None, device=torch.device("cpu"))
    for count in (2, 65, 66, 101):
        with pytest.raises(Compiled):
            scorer({}, [torch.arange(count) % 60], 1)
    assert lengths == [66, 66, 102, 102]
    with pytest.raises(ConfigError, match="a text of 102 tokens: at most 101 fit here"):
        scorer({}, [torch.arange(102) % 60], 1)
