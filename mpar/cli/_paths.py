"""The paths of a configuration as they are recorded: absolute, so that a run can be read from any working directory."""

from collections.abc import Callable
from pathlib import Path

from mpar.train import PlainConfig, PlainValue

__all__ = ["with_absolute_paths"]

_FOLDERS = ("model.path", "data.tokenizer", "data.cache_dir", "schedule.table", "init_from", "resume.path")
_SOURCES = ("data.sources", "evaluation.sources")
_NAMED_SOURCES = ("self-cognition", "python-stdlib")


def with_absolute_paths(plain: PlainConfig, folder: Path) -> PlainConfig:
    """`plain` with every path that was given relative to `folder` made absolute. Names that are no paths stay as they are."""
    for key in _FOLDERS:
        plain = _changed(plain, key.split("."), lambda value: _existing(value, folder))
    for key in _SOURCES:
        plain = _changed(plain, key.split("."), lambda value: _sources(value, folder))
    return plain


def _changed(plain: PlainConfig, names: list[str], change: Callable[[PlainValue], PlainValue]) -> PlainConfig:
    if names[0] not in plain:
        return plain
    value = plain[names[0]]
    if len(names) == 1:
        return plain | {names[0]: change(value)}
    return plain | {names[0]: _changed(value, names[1:], change)} if isinstance(value, dict) else plain


def _existing(value: PlainValue, folder: Path) -> PlainValue:
    """The path from the root if there is such a file or folder; else it may be a word, such as `bytes` or `auto`."""
    return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value


def _sources(value: PlainValue, folder: Path) -> PlainValue:
    """Sources may be globs, and may have `#N` behind them."""
    if isinstance(value, list):
        return [_sources(item, folder) for item in value]
    if isinstance(value, dict):
        return {name: _sources(item, folder) for name, item in value.items()}
    local = isinstance(value, str) and value.split("#")[0] not in _NAMED_SOURCES and "://" not in value
    return str(folder / value) if local else value  # type: ignore[operator]  # a local one is a str
