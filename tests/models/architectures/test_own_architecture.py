"""Architectures are data: the table holds what it says, and one of your own goes in as an argument."""

import dataclasses
import inspect
import pickle
import runpy

import pytest
import torch

from mpar import models
from mpar.errors import UnknownNameError
from mpar.models import ARCHITECTURES, LLAMA
from mpar.models.architectures import Plain, Values, architecture_table
from mpar.models.decoder import DecoderConfig
from tests.models.variants import BASE


def wide(title: str, values: Values, plain: Plain) -> DecoderConfig:
    """Llama, its embeddings multiplied by two."""
    return dataclasses.replace(plain.stack(), embed_scale=2.0)


WIDE = dataclasses.replace(LLAMA, name="wide_llama", hf_class="WideLlamaForCausalLM", settings=wide)


def test_declaring_registers_nothing():
    """A variant of an architecture, even of the same name, and a declaration run once more leave the table as it was."""
    before = dict(ARCHITECTURES)
    changed = dataclasses.replace(LLAMA, settings=wide)
    runpy.run_path(inspect.getfile(LLAMA.settings))
    assert changed.name == "llama" and WIDE.name not in ARCHITECTURES
    assert before == ARCHITECTURES and ARCHITECTURES["llama"] is LLAMA
    with pytest.raises(TypeError):
        ARCHITECTURES["wide_llama"] = WIDE


def test_names_are_those_of_the_declarations():
    """Every key is the name of what it leads to, and no two declarations have one name."""
    declared = [value for value in vars(models).values() if isinstance(value, models.Architecture)]
    assert {name: value.name for name, value in ARCHITECTURES.items()} == {a.name: a.name for a in declared}


def test_an_architecture_of_your_own_is_an_argument(tmp_path):
    """It builds, computes what its settings say, and its folders are written and read; elsewhere nobody knows it."""
    table = architecture_table([WIDE])
    model = models.build("wide_llama", BASE, architectures=table)
    assert model.architecture is WIDE
    assert model.config == dataclasses.replace(models.build("llama", BASE).config, embed_scale=2.0)
    params = model.init(0)
    models.to_hf(model, params, tmp_path / "hf")
    again, read = models.from_hf(tmp_path / "hf", architectures={**ARCHITECTURES, **table})
    assert again.config == model.config
    tokens = torch.arange(6)[None]
    assert torch.equal(again.apply(read, tokens), model.apply(params, tokens))
    assert not torch.equal(model.apply(params, tokens), models.build("llama", BASE).apply(params, tokens))
    with pytest.raises(UnknownNameError, match=r"model_type='wide_llama'.*known ones: .*llama \(LlamaForCausalLM\)"):
        models.from_config(tmp_path / "hf")
    with pytest.raises(UnknownNameError, match=r"known ones: wide_llama \(WideLlamaForCausalLM\)$"):
        models.build("llama", BASE, architectures=table)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_models_compare_hash_and_pickle_by_value(kind):
    """A model that comes back from another process is the same model."""
    model = models.build(kind, BASE)
    again = pickle.loads(pickle.dumps(model))
    assert again == model and hash(again) == hash(model)
    assert model != models.build("qwen2", BASE)
