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

from mpar.cli._bind import bind, known_keys, nearest, open_keys
from mpar.cli._choices import Choices, choices
from mpar.cli._named import NameSource
from mpar.cli._own_conf import OwnSource
from mpar.conf_dir import conf_dir
from mpar.errors import ConfigError, UnknownNameError
from mpar.train import PlainConfig

__all__ = ["bind_composed", "check_overrides", "compose_config", "compose_plain", "hydra_ready"]

T = TypeVar("T")
_HYDRA = "hydra"


def compose_config(name: str, cls: type[T], overrides: Sequence[str], user_dir: Path | None = None) -> tuple[T, PlainConfig]:
    """`conf/<name>.yaml` with `overrides` applied: as `cls`, and as the plain data that a run saves. Raises ConfigError.

    user_dir: the user's folder, whose files are choices beside those of `conf/`.
    """
    plain = compose_plain(name, cls, overrides, user_dir)
    return bind(cls, plain), plain


def compose_plain(name: str, cls: type, overrides: Sequence[str], user_dir: Path | None = None) -> PlainConfig:
    """The composed configuration as plain data that is not yet bound: values may be missing or of a wrong type."""
    checked = check_overrides(name, cls, overrides, user_dir)
    with hydra_ready(checked, user_dir) as ready:
        return _plain(compose(name, overrides=ready))


def bind_composed(cls: type[T], composed: DictConfig) -> tuple[T, PlainConfig]:
    """A configuration that Hydra composed, as `cls` and as plain data."""
    plain = _plain(composed)
    return bind(cls, plain), plain


def _plain(composed: DictConfig) -> PlainConfig:
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != _HYDRA}


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


def check_overrides(name: str, cls: type, overrides: Sequence[str], user_dir: Path | None = None) -> list[str]:
    """The overrides in the form in which Hydra accepts keys that no file mentions.

    Raises UnknownNameError, which lists every override whose key or choice does not exist, each with the nearest that does.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"cannot read the arguments: each must be group=choice or key=value.\n{error}") from error
    known = choices(user_dir)
    groups = known if name == "train" else Choices({})
    keys, dict_keys = known_keys(cls), open_keys(cls)
    problems = [line for override in parsed for line in _problems(override, groups, keys, dict_keys)]
    if problems:
        raise UnknownNameError("unknown arguments:\n  " + "\n  ".join(problems))
    return [_forced(override, groups) for override in parsed]


def _forced(override: Override, groups: Choices) -> str:
    """`++key=value` for `key=value`: without the `++` Hydra refuses a key whose default is in no file but in the dataclass."""
    line = str(override.input_line)
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
        near = nearest(key, keys)
        yield f"{argument}: there is no key {key!r}; did you mean {near}?"
