"""Options of models: as one value, as keywords, as both."""

import dataclasses
import typing

import pytest
import torch

from mpar import models
from mpar.errors import ConfigError
from mpar.models import ModelOptions
from mpar.models._options import OptionWords
from tests.models.variants import BASE, KINDS

EVERY = ModelOptions(
    dtype=torch.float64,
    ignore=("strange",),
    vocab_multiple=8,
    logits_chunk=4,
    mlp_chunk=3,
    router={"seq_aux_loss": 0.1},
    mtp_loss_weight=0.3,
    dropout=0.1,
)
CONFIG = {key: value for key, value in KINDS["deepseek_v3"].base.items() if value is not None} | {"strange": 1}


def test_keywords_are_the_fields():
    """The keywords of `build` and the like have the names and the types of the fields."""
    fields = typing.get_type_hints(ModelOptions)
    assert typing.get_type_hints(OptionWords) == fields
    assert list(fields) == [field.name for field in dataclasses.fields(EVERY)]
    defaults = dataclasses.asdict(ModelOptions())
    assert all(getattr(EVERY, name) != value for name, value in defaults.items())


def test_a_value_and_keywords_give_the_same_model():
    """One value, its fields as keywords, and keywords over a value."""
    model = models.build("deepseek_v3", CONFIG, EVERY)
    assert models.build("deepseek_v3", CONFIG, **{f.name: getattr(EVERY, f.name) for f in dataclasses.fields(EVERY)}) == model
    assert models.from_config({"model_type": "deepseek_v3", **CONFIG}, EVERY) == model
    other = dataclasses.replace(EVERY, dtype=torch.float32, mlp_chunk=None)
    assert models.build("deepseek_v3", CONFIG, other, dtype=torch.float64, mlp_chunk=3) == model


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EVERY) if field.name != "ignore"])
def test_every_option_reaches_the_model(name):
    """Each of them makes another model."""
    without = dataclasses.replace(EVERY, **{name: getattr(ModelOptions(), name)})
    assert models.build("deepseek_v3", CONFIG, without) != models.build("deepseek_v3", CONFIG, EVERY)


def test_keys_are_ignored_only_where_asked():
    """Without `ignore` the unknown key is refused."""
    with pytest.raises(ConfigError, match="strange=1"):
        models.build("deepseek_v3", CONFIG, dataclasses.replace(EVERY, ignore=()))


def test_unknown_keywords_are_refused():
    """A misspelt option is an error."""
    with pytest.raises(TypeError, match="logits_chunks"):
        models.build("llama", BASE, logits_chunks=4)


@pytest.mark.parametrize("changes", [{"vocab_multiple": 0}, {"logits_chunk": 0}, {"dtype": torch.int32}], ids=str)
def test_what_no_model_can_have_is_refused_at_once(changes):
    """The options themselves name the field."""
    with pytest.raises(ConfigError, match=next(iter(changes))):
        ModelOptions(**changes)
