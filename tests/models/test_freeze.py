"""Freezing by names, segments and share: what is frozen, what is trained all the same, and what is refused."""

import itertools

import pytest

from mpar import models, tree
from mpar.errors import ConfigError, UnknownNameError
from tests.program.oracle import BASE, MOE

LLAMA = models.from_config({**BASE, "model_type": "llama", "num_hidden_layers": 4})


def frozen(**how: object) -> set[str]:
    return set(models.freeze(LLAMA, **how).frozen)


def under(*places: str) -> set[str]:
    return {path for path in tree.paths(LLAMA.abstract_params) if path.startswith(places)}


@pytest.mark.parametrize(
    ("how", "places"),
    [
        ({"names": ["embed"]}, ("embed.",)),
        ({"names": ["layers.[0-2]"]}, ("layers.0.", "layers.1.", "layers.2.")),
        ({"names": ["model.layers.1.*", "lm_head.weight"]}, ("layers.1.", "head.head_DV")),
        ({"names": ["model.embed_tokens"]}, ("embed.",)),
        ({"segments": ["embed", "layers.3"]}, ("embed.", "layers.3.")),
        ({"names": ["layers.*"], "trainable": ["layers.[1-9]", "*norm*"]}, ("layers.0.attention.", "layers.0.mlp.")),
    ],
    ids=str,
)
def test_chooses_by_names_and_segments(how, places):
    """Patterns are of mpar's paths or of names of Hugging Face tensors; exceptions stay trainable."""
    assert frozen(**how) == under(*places)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_ratio_is_a_share_of_the_first_numbers(ratio):
    """The first whole parameters are frozen, as many as have at most the share of all numbers; one more would be too many."""
    paths = tree.paths(LLAMA.abstract_params)  # they are in the order of the chain
    sums = list(itertools.accumulate(tree.get(LLAMA.abstract_params, path).numel() for path in paths))
    chosen = frozen(ratio=ratio)
    assert chosen == set(paths[: len(chosen)])
    assert sums[len(chosen) - 1] <= ratio * sums[-1] < sums[len(chosen)]


def test_freezes_further_and_less():
    """What was frozen before stays so, unless it is among the exceptions; without a choice the model is returned as it is."""
    first = models.freeze(LLAMA, segments=["embed"])
    second = models.freeze(first, names=["head"], trainable=["embed"])
    assert set(second.frozen) == under("head.") and models.freeze(LLAMA) is LLAMA
    assert (second.name, second.vocab_size, second.segments) == (LLAMA.name, LLAMA.vocab_size, LLAMA.segments)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"names": ["layer.0.*"]}, UnknownNameError, r"names: no parameter matches 'layer.0.\*'; the nearest are layers.0"),
        ({"trainable": ["lm_hed"]}, UnknownNameError, "trainable: no parameter matches 'lm_hed'; the nearest are lm_head"),
        ({"segments": ["layers.9"]}, UnknownNameError, "segments: no segment matches 'layers.9'; the nearest are layers"),
        ({"ratio": 1.5}, ConfigError, "a share of 1.5 of the parameters: it must be between 0 and 1"),
        ({"ratio": 0.1}, ConfigError, "the first one, embed.table_VD, has 0.137 of all numbers"),
        ({"names": ["*"]}, ConfigError, "cannot freeze all 39 parameters of llama"),
    ],
    ids=str,
)
def test_bad_choices_are_refused(how, error, words):
    """Patterns that match nothing with the nearest names, and what leaves nothing to train."""
    with pytest.raises(error, match=words):
        models.freeze(LLAMA, **how)


def test_a_part_of_a_parameter_is_refused():
    """The experts of a layer are one parameter: a pattern of the tensors of some of them cannot freeze it."""
    model = models.from_config(MOE)
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.experts.3' matches 1 of the 8 tensors of layers.0.mlp.down_EFD"):
        models.freeze(model, names=["model.layers.0.mlp.experts.3"])
    every = models.freeze(model, names=["model.layers.0.mlp.experts.*"]).frozen
    assert every == {f"layers.0.mlp.{name}" for name in ("gate_EDF", "up_EDF", "down_EFD")}
