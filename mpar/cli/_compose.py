"""Composes configurations with Hydra, and refuses unknown keys and choices with the nearest valid name, as Hydra does not."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpar.cli._bind import Check, bind, key_of_word, known_keys, listed, no_such_key, open_keys, text_keys
from mpar.cli._choices import Choices, choices
from mpar.cli._limits import bounded
from mpar.cli._named import NameSource
from mpar.cli._own_conf import OwnSource
from mpar.cli._written import cannot_read, quote_texts, without_dashes
from mpar.conf_dir import conf_dir
from mpar.errors import ConfigError, UnknownNameError
from mpar.train import PLUGGABLE, PlainConfig, with_options

__all__ = ["check_overrides", "compose_config", "compose_plain", "hydra_ready", "plain_config"]

T = TypeVar("T")
_HYDRA = "hydra"


def compose_config(
    name: str, cls: type[T], overrides: Sequence[str], user_dir: Path | None = None, check: Check[T] | None = None
) -> tuple[T, PlainConfig]:
    """`conf/<name>.yaml` with `overrides` applied: as `cls`, and as the plain data that a run saves. Raises ConfigError.

    user_dir: the user's folder, whose files are choices beside those of `conf/`. check: finds what else is wrong.
    """
    plain = compose_plain(name, cls, overrides, user_dir)
    return bind(cls, plain, check), plain


def compose_plain(name: str, cls: type, overrides: Sequence[str], user_dir: Path | None = None) -> PlainConfig:
    """The composed configuration as plain data that is not yet bound: values may be missing or of a wrong type."""
    checked = check_overrides(name, cls, overrides, user_dir)
    with hydra_ready(checked, user_dir) as ready, bounded(user_dir):
        return plain_config(compose(name, overrides=ready))


def plain_config(composed: DictConfig) -> PlainConfig:
    """A composed configuration as plain data: without the settings of Hydra, parameters of plug-ins in `options`."""
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(plain, dict)
    return with_options({str(key): value for key, value in plain.items() if key != _HYDRA})


@contextmanager
def hydra_ready(overrides: Sequence[str], user_dir: Path | None) -> Iterator[list[str]]:
    """Set Hydra up with mpar's groups, the names that are parsed, and the files in `user_dir`.

    Yields the overrides to compose with: one that tells Hydra where to look for groups, then `overrides`. It is an override so
    that the processes of a sweep get it, too.
    Errors of Hydra are raised as ConfigError.
    """
    places = [NameSource.URL, *([] if user_dir is None else [f"{OwnSource.scheme()}://{user_dir}"])]
    quoted = ",".join("'" + place.replace("'", "\\'") + "'" for place in places)
    for source in (NameSource, OwnSource):
        Plugins.instance().register(source)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
            yield [f"{_HYDRA}.searchpath=[{quoted}]", *overrides]
    except MissingConfigException as error:
        raise UnknownNameError(_missing(error, choices(user_dir))) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose the configuration from {list(overrides)}:\n{error}") from error


def _missing(error: MissingConfigException, known: Choices) -> str:
    """The message for a choice that does not exist and that a configuration file asks for."""
    group, _, name = (error.missing_cfg_file or "").strip("/").rpartition("/")
    if group not in known.shown:
        return f"cannot compose the configuration: {error}"
    return f"cannot compose the configuration: a file that was chosen asks for {group}={name}; {known.refusal(group, name)}"


def check_overrides(
    name: str, cls: type, overrides: Sequence[str], user_dir: Path | None = None, *, multirun: bool = False
) -> list[str]:
    """The overrides in the form in which Hydra accepts texts, and keys that no file mentions.

    multirun: commas in texts separate the values of a sweep.

    Raises UnknownNameError, which lists every override that cannot be read or whose key or choice does not exist, each with the
    nearest that does.
    """
    known = choices(user_dir)
    groups = known if name == "train" else known.of(cls)
    keys, dict_keys = known_keys(cls), open_keys(cls)
    overrides, problems = without_dashes(overrides, [*keys, *groups.shown])
    checked, plugged = [], _plugged(overrides, user_dir) if groups.shown else set()
    for argument in overrides if multirun else quote_texts(overrides, text_keys(cls)):
        try:
            (override,) = OverridesParser.create().parse_overrides([argument])
        except HydraException as error:
            problems.append(cannot_read(argument, str(error)))
            continue
        found = list(_problems(override, groups, keys, dict_keys)) if not _of_plug_in(override, plugged) else []
        if not found and not multirun and override.is_sweep_override():
            found = [f"{override.input_line}: several values are a sweep; write mpar train -m, or quotes around one text"]
        problems += found
        checked.append(_forced(override, groups, cls))
    if problems:
        raise UnknownNameError(f"unknown arguments:{listed(problems)}")
    return checked


def _plugged(overrides: Sequence[str], user_dir: Path | None) -> set[str]:
    """The groups that may have a plug-in, whose parameters are known only when everything is composed."""
    named = {name for name in PLUGGABLE for word in overrides if word.startswith(f"{name}=") and ":" in word}
    return named if user_dir is None else set(PLUGGABLE)


def _of_plug_in(override: Override, plugged: set[str]) -> bool:
    """Whether the key of an override may be a parameter of a plug-in."""
    group, dot, _ = override.key_or_group.partition(".")
    return bool(dot) and group in plugged


def _forced(override: Override, groups: Choices, cls: type) -> str:
    """`++key=value` for `key=value`: without the `++` Hydra refuses a key whose default is in no file but in the dataclass."""
    line = str(override.input_line)
    value = None if override.is_sweep_override() else override.value()
    key = key_of_word(cls, override.key_or_group, value) if isinstance(value, str) else override.key_or_group
    if key != override.key_or_group:  # one word for a group must not replace the keys that other arguments give to the group
        line = f"{key}={line.partition('=')[2]}"
    plain = override.type == OverrideType.CHANGE and override.key_or_group not in groups.shown
    return f"++{line}" if plain and not override.key_or_group.startswith(_HYDRA) else line


def _problems(override: Override, groups: Choices, keys: list[str], dict_keys: list[str]) -> Iterable[str]:
    key, argument = override.key_or_group, override.input_line
    if key == f"{_HYDRA}.searchpath":
        yield f"{argument}: give the folder of your own configurations as --config-dir DIR"
    if key.split(".")[0].split("/")[0] == _HYDRA:
        return
    if key in groups.shown:
        value = override.value()
        names = value.list if isinstance(value, ChoiceSweep) else [value]
        for choice in names:
            if isinstance(choice, str) and not groups.has(key, choice):
                yield f"{argument}: {groups.refusal(key, choice)}"
    elif key not in keys and not any(key.startswith(f"{open_key}.") for open_key in dict_keys):
        yield f"{argument}: there is no key {key!r}; {no_such_key(key, keys)}"
