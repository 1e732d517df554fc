"""Configuration groups and what is refused."""

import pytest

from mpar.cli._bind import known_keys
from mpar.cli._choices import choices
from mpar.cli._compose import compose_config
from mpar.cli._help import describe_config
from mpar.errors import ConfigError, UnknownNameError
from mpar.strategy import PRESETS
from mpar.train import MeshConfig, TrainConfig, make_optimizer, make_setup

CHOICES = [(group, name) for group, names in choices().shown.items() for name in names]


def composed(*overrides: str) -> TrainConfig:
    return compose_config("train", TrainConfig, overrides)[0]


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=str)
def test_every_choice_is_usable(group, name):
    """Each file of each group, and each name that is shown, composes, binds, and gives the thing that it describes."""
    needed = {"hf": ["model.path=/nowhere"], "jsonl": ["data.sources=[x.jsonl]"]}.get(name, [])
    config = composed(f"{group}={name}", *needed)
    assert make_optimizer(config.optimizer, config.steps).rate(1) >= 0
    if name != "hf":
        setup = make_setup(config)
        named = {"hardware": setup.hardware.name, "strategy": setup.strategy.name, "model": config.model.name}
        assert named.get(group, name) == name


def test_every_preset_is_a_choice():
    """Every strategy of mpar.strategy can be chosen by its name, and is shown."""
    assert set(choices().shown["strategy"]) == set(PRESETS)
    assert all(composed(f"strategy={name}").strategy.name == name for name in PRESETS)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("one", {}),
        ("tp1", {}),
        ("dp16", {"dp": 16}),
        ("pp2_fsdp2_tp2", {"pp": 2, "fsdp": 2, "tp": 2}),
        ("pp3_dp4_fsdp5_cp6_tp7", {"pp": 3, "dp": 4, "fsdp": 5, "cp": 6, "tp": 7}),
    ],
)
def test_a_mesh_is_its_name(name, sizes):
    """Any product of axes is a mesh; axes that the name leaves out have size 1, whatever the default mesh is."""
    assert composed(f"mesh={name}").mesh == MeshConfig(**sizes)


def test_a_size_on_top_of_a_name():
    """`mesh.fsdp=8` changes one axis of the mesh that was named."""
    assert composed("mesh=dp2_tp2", "mesh.fsdp=8").mesh == MeshConfig(dp=2, fsdp=8, tp=2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ffsdp2", "'ffsdp2' is no axis with a size; did you mean mesh=fsdp2?"),
        ("tp2_pp2", "its axes are not in order; did you mean mesh=pp2_tp2?"),
        ("tp2_tp2", "it has an axis twice; did you mean mesh=tp2?"),
        ("pp_tp4", "'pp' is no axis with a size; did you mean mesh=pp2_tp4?"),
        ("dp0", "'dp0' is no axis with a size; did you mean mesh=dp2?"),
        ("dp2tp2", "'dp2tp2' is no axis with a size; did you mean mesh=dp2_tp2?"),
        ("on", "'on' is no axis with a size; did you mean mesh=one?"),
        ("ep2_sp2", "'ep2' and 'sp2' are no axes with a size"),
    ],
)
def test_what_names_no_mesh(name, words):
    """The words of the name that are wrong, the nearest mesh, and how meshes are named."""
    with pytest.raises(UnknownNameError) as caught:
        composed(f"mesh={name}")
    assert words in str(caught.value)
    assert "in the order pp, dp, fsdp, cp, tp" in str(caught.value)


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
        ("hydra.searchpath=[x]", "as --config-dir DIR"),
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
    with pytest.raises(ConfigError, match=r"model\.path is missing: a Hugging Face folder"):
        composed("model=hf")


def test_nonsense_is_no_traceback():
    """Hydra's own complaints become one of ours."""
    with pytest.raises(ConfigError, match=r"must be key=value or group=choice.*write steps="):
        composed("steps")


def test_help_names_every_key():
    """`--help` has each key with its meaning."""
    text = describe_config("train", TrainConfig, [])
    leaves = [key for key in known_keys(TrainConfig) if not any(other.startswith(f"{key}.") for other in known_keys(TrainConfig))]
    assert not [key for key in leaves if f"  {key}=" not in text]
    assert "  model.options={} " in text and "<dataclasses" not in text
    assert "peak learning rate (a number, at least 0)" in text
    assert "such as pp2_fsdp2_tp2; or one" in " ".join(text.split())
    assert all(f" {name}" in text for name in PRESETS)
