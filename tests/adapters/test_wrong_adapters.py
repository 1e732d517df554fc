"""Adapters that cannot be: names that match nothing, folders of another base, values that are not finite."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpar import adapters, models, testing, tree
from mpar.adapters import LoRA
from mpar.errors import CheckpointError, ConfigError, UnknownNameError
from tests.program.oracle import BASE, MOE

LLAMA = {**BASE, "model_type": "llama", "tie_word_embeddings": False}
TIED = {**BASE, "model_type": "llama", "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def base():
    """A small model."""
    return models.from_config(LLAMA)


@pytest.fixture
def folder(base, tmp_path):
    """An adapter of it."""
    model = adapters.add(base, LoRA(rank=2))
    adapters.write_peft(model, adapters.first_params(model, base.init(0), 0), tmp_path / "adapter")
    return tmp_path / "adapter"


REFUSED = {
    "a target that is not there": (LoRA(targets=("q_prj", "v_proj")), r"targets has 'q_prj'.* nearest: q_proj"),
    "a pattern that matches nothing": (LoRA(targets=r".*\.q_prj"), r"targets has '\.\*\\\\\.q_prj', which matches no matrix"),
    "all excluded": (LoRA(targets=("q_proj",), exclude=("q_proj",)), "leave none of the targets"),
    "DoRA of an embedding": (LoRA(targets=("embed_tokens",), dora=True), "embed_tokens, a matrix of kind embedding, has no dora"),
    "no such module to save": (LoRA(modules_to_save=("head",)), "modules_to_save has 'head'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_names_are_refused(case, base):
    """All names that match nothing are listed, with the nearest ones."""
    lora, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        adapters.add(base, lora)


def test_values_are_refused():
    """Everything that is wrong is said at once."""
    with pytest.raises(ConfigError, match=r"(?s)rank=0.*alpha=-1.*dropout=1.*init='zero'"):
        LoRA(rank=0, alpha=-1, dropout=1, init="zero")


def test_experts_have_no_dropout():
    """As in PEFT; the way out is said."""
    with pytest.raises(
        ConfigError, match=r"experts\.gate_up_proj, a matrix of kind parameter, has no dropout; name it in exclude"
    ):
        adapters.add(models.from_config(MOE), LoRA(dropout=0.1))


def test_names_of_adapters(base):
    """A name is given once, and only known ones are made active."""
    model = adapters.add(base, LoRA(rank=2))
    with pytest.raises(ConfigError, match=r"cannot call an adapter 'default'"):
        adapters.add(model, LoRA(rank=2))
    with pytest.raises(UnknownNameError, match=r"no adapters are called \['other'\]; there are \['default'\]"):
        model.with_active("other")


def test_folder_of_another_base(base, folder):
    """Every tensor that differs is listed, with both shapes; so is a base of equal shapes with another name."""
    other = models.from_config({**LLAMA, "intermediate_size": 32})
    with pytest.raises(CheckpointError, match=r"gate_proj.lora_B.weight is \(24, 2\), the model asks for \(32, 2\)"):
        adapters.AdapterReader(adapters.add(other, LoRA(rank=2)), folder)
    with pytest.raises(CheckpointError, match=r"missing: .*embed_tokens"):
        adapters.AdapterReader(adapters.add(base, LoRA(rank=2, targets=("embed_tokens", "q_proj"))), folder)
    mistral = models.from_config({**LLAMA, "model_type": "mistral"})
    with pytest.raises(CheckpointError, match="base: it was trained with a model"):
        adapters.AdapterReader(adapters.add(mistral, adapters.read_lora(folder)), folder)


def test_folder_of_another_kind(folder):
    """What PEFT has and mpar has not is refused, not ignored."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3", "lora_bias": True}))
    with pytest.raises(CheckpointError, match=r"(?s)peft_type='IA3'.*lora_bias=True"):
        adapters.read_lora(folder)


def test_merging_refuses(base, folder):
    """A weight that would not be finite, and one of two tied matrices."""
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: x * torch.inf if "lora_B" in name else x for name, x in weights.items()}, folder / "adapter_model.safetensors"
    )
    model = adapters.add(base, adapters.read_lora(folder))
    params = adapters.read_peft(model, folder, base.init(0))
    with pytest.raises(ConfigError, match=r"cannot merge default into layers\.0\.attention\.q_DNH"):
        adapters.merge(model, params)
    tied = adapters.add(models.from_config(TIED), LoRA(targets=("embed_tokens",)))
    with pytest.raises(ConfigError, match="embedding and head of this llama model are one tensor"):
        adapters.merge(tied, tied.init(0))


def test_merged_is_unmerged(base):
    """Merging and taking away gives the weights again; the merged model has the loss of the adapted one, in float32."""
    model = adapters.add(base, LoRA(rank=2, init="random"))
    params = adapters.first_params(model, base.init(0), 0)
    merged = adapters.merge(model, params)
    back = adapters.unmerge(model, merged, params)
    for (path, mine), theirs in zip(tree.leaves_with_path(back), tree.leaves(params), strict=True):
        assert (mine - theirs).abs().max() < 1e-7, path
    generator = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(0, 61, (2, 8), generator=generator) for key in ("tokens", "labels")}
    context, x = model.context(batch), None
    for segment in model.segments:
        x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
    testing.assert_close(base.loss(merged, batch)[0], losses["loss"], name="loss")
