"""Configuration groups and what is refused."""

import pytest

from mpar.cli._bind import known_keys
from mpar.cli._compose import choices, compose_config, describe_config
from mpar.errors import ConfigError, UnknownNameError
from mpar.strategy import PRESETS
from mpar.train import TrainConfig, make_hardware, make_model, make_optimizer, make_strategy

CHOICES = [(group, name) for group, names in choices().items() for name in names]


def composed(*overrides: str) -> TrainConfig:
    return compose_config("train", TrainConfig, overrides)[0]


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=str)
def test_every_choice_is_usable(group, name):
    """Each file of each group composes, binds, and gives the thing that it describes."""
    needed = {"hf": ["model.path=/nowhere"], "jsonl": ["data.sources=[x.jsonl]"]}.get(name, [])
    config = composed(f"{group}={name}", *needed)
    make_strategy(config)
    make_hardware(config.hardware)
    make_optimizer(config.optimizer, config.steps)
    if name != "hf":
        make_model(config)


def test_every_preset_is_a_choice():
    """conf/strategy has a file for each strategy of mpar.strategy, which names it."""
    assert set(choices()["strategy"]) == set(PRESETS)
    assert all(composed(f"strategy={name}").strategy.name == name for name in ("ddp", "zero3_tp", "tp"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rat=1", "did you mean optimizer.lr?"),
        ("+learning_rat=1", "did you mean optimizer.lr?"),
        ("++stesp=1", "did you mean steps?"),
        ("strateg=tp", "did you mean strategy?"),
        ("strategy=zero3_tpp", "did you mean strategy=zero3_tp?"),
        ("model=llama_8b", "did you mean model=llama3_8b?"),
        ("mesh.ftp=2", "did you mean mesh.tp?"),
    ],
)
def test_a_misspelt_name_finds_the_nearest(override, words):
    """Unknown keys and choices are refused, with the nearest that is valid."""
    with pytest.raises(UnknownNameError) as caught:
        composed(override)
    assert words in str(caught.value)


def test_all_misspelt_names_at_once():
    """One error lists every offender."""
    with pytest.raises(UnknownNameError) as caught:
        composed("stesp=1", "optimizer.lrr=1", "strategy=tpp")
    assert all(name in str(caught.value) for name in ("stesp", "lrr", "tpp"))


def test_a_key_that_no_file_mentions_can_be_set():
    """Defaults in the dataclasses are settable without Hydra's `+`."""
    assert composed("data.seq_len=64", "checkpoint.every=7").data.seq_len == 64


def test_a_missing_value_says_what_it_is():
    """`???` in a file is asked for by its meaning."""
    with pytest.raises(ConfigError, match=r"model\.path is missing: a folder of Hugging Face"):
        composed("model=hf")


def test_nonsense_is_no_traceback():
    """Hydra's own complaints become one of ours."""
    with pytest.raises(ConfigError, match="group=choice or key=value"):
        composed("steps")


def test_help_names_every_key():
    """`--help` has each key with its meaning."""
    text = describe_config("train", TrainConfig, [])
    leaves = [key for key in known_keys(TrainConfig) if not any(other.startswith(f"{key}.") for other in known_keys(TrainConfig))]
    assert not [key for key in leaves if f"  {key}=" not in text]
    assert "peak learning rate (a number)" in text
