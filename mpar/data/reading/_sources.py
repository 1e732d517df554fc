"""Finds the files that each source of data means."""

import glob
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mpar.data.reading._files import COMPRESSED, file_format, is_remote, optional
from mpar.errors import DataError
from mpar.files import kind_of_file

__all__ = ["PYTHON_STDLIB", "ROW_FORMATS", "SELF_COGNITION", "Source", "find_sources", "is_indexed"]

PYTHON_STDLIB = "python-stdlib"
SELF_COGNITION = "self-cognition"
PREFERENCES = "preferences"
ROW_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""The suffixes of files that hold rows with columns; every other file is one row of plain text."""
_TEXT_FORMATS = (".txt", ".md", ".rst")
_SKIPPED_FOLDERS = {"__pycache__", "idle_test", "site-packages", "test", "tests"}  # of the standard library
_HUB, _MODELSCOPE = "hf::", "ms::"


@dataclass(frozen=True)
class Source:
    """Files to read in this order, and how many of their usable rows to take (None: all).

    indexed: the files are pairs of Megatron's, which `files` names without .bin and .idx.
    """

    name: str
    files: tuple[str, ...]
    limit: int | None = None
    indexed: bool = False

    @property
    def remote(self) -> bool:
        """Whether any file is on another file system."""
        return any(map(is_remote, self.files))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The local files on disk."""
        names = [f"{file}.{suffix}" for file in self.files for suffix in ("idx", "bin")] if self.indexed else self.files
        return tuple(Path(name) for name in names if not is_remote(name))


class _NotFound(Exception):
    """Says why a source has no file."""


def find_sources(kind: str, names: Sequence[str]) -> tuple[Source, ...]:
    """The files that each name means: a file, a folder, a glob, an address, `self-cognition`, `preferences` or `python-stdlib`.
    `NAME#N` asks for N rows.

    Files of a folder or glob come in sorted order. Raises DataError naming every source that has no file or does not fit `kind`.
    """
    sources, faults = [], []
    for name in names:
        match = None if os.path.exists(name) else re.fullmatch(r"(.+)#(\d+)", name)
        pattern, limit = (match[1], int(match[2])) if match else (name, None)
        try:
            sources.append(_source(kind, name, pattern, limit))
        except _NotFound as fault:
            faults.append(f"{name!r}: {fault}")
    if not faults and len({source.indexed for source in sources}) > 1:
        indexed = [source.name for source in sources if source.indexed]
        faults.append(f"{', '.join(indexed)} are indexed tokens, the others are rows; a run reads one or the other")
    if faults or not names:
        known = f"{SELF_COGNITION} (kind sft), {PREFERENCES} (pairs), {PYTHON_STDLIB} (kind pt)"
        raise DataError(
            f"cannot find the data: {'; '.join(faults) or 'no source is named'}.\n"
            f"A source is a file, a folder, a glob such as 'texts/**/*.md', an address such as s3://bucket/rows.jsonl, or one of "
            f"{known}; add #N for N rows of it. Files of rows are {', '.join(ROW_FORMATS)}, also compressed "
            f"({', '.join(COMPRESSED)})."
        )
    return tuple(sources)


def _source(kind: str, name: str, pattern: str, limit: int | None) -> Source:
    if is_indexed(pattern):
        if kind != "pt":
            raise _NotFound(f"it is indexed tokens, which kind {kind} cannot read: only kind pt does")
        if limit is not None:
            raise _NotFound("#N takes rows, and indexed tokens have none; use data.weights")
        return Source(name, (_prefix(pattern),), indexed=True)
    files = _find_files(kind, pattern)
    if kind != "pt":
        wrong = [file for file in files if file_format(file) not in ROW_FORMATS]
        if wrong:
            raise _NotFound(f"kind {kind} reads {', '.join(ROW_FORMATS)}, not {', '.join(wrong[:3])}")
    return Source(name, files, limit)


def is_indexed(name: str) -> bool:
    """Whether a source is a pair of files of Megatron's indexed tokens."""
    return all(os.path.isfile(f"{_prefix(name)}.{suffix}") for suffix in ("bin", "idx"))


def _prefix(name: str) -> str:
    return re.sub(r"\.(bin|idx)$", "", name)


def _find_files(kind: str, pattern: str) -> tuple[str, ...]:
    if pattern in (SELF_COGNITION, PREFERENCES, PYTHON_STDLIB):
        return _bundled(kind, pattern)
    if "\0" in pattern:
        raise _NotFound("no path has a zero byte")
    if pattern.startswith(_HUB):
        return _find_on_hub(pattern.removeprefix(_HUB))
    if pattern.startswith(_MODELSCOPE):
        raise _NotFound(
            "data sets of ModelScope are not downloaded here; `MsDataset.load(...).to_hf_dataset().save_to_disk(folder)` makes a "
            "folder, where the modelscope library is installed"
        )
    if is_remote(pattern):
        return _find_remote(pattern)
    if os.path.isdir(pattern):
        return _files_of_folder(kind, pattern)
    names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = tuple(name for name in names if os.path.isfile(name))
    if not files:
        missing = "no such file; behind # stands a whole number of rows" if "#" in pattern else "no such file"
        raise _NotFound(missing if not names else f"{names[0]} is {kind_of_file(os.stat(names[0]).st_mode)}, not a file")
    return files


def _bundled(kind: str, name: str) -> tuple[str, ...]:
    if name == SELF_COGNITION:
        if kind != "sft":
            raise _NotFound(f"it holds conversations, kind is {kind}")
        return (str(resources.files("mpar.data").joinpath("self_cognition.jsonl")),)
    if name == PREFERENCES:
        return (str(resources.files("mpar.data").joinpath("preferences.jsonl")),)
    if kind != "pt":
        raise _NotFound(f"it holds plain text, kind is {kind}")
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(p for p in root.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts))
    if not modules:
        raise _NotFound(f"no source file under {root}")
    return tuple(map(str, modules))


def _files_of_folder(kind: str, folder: str) -> tuple[str, ...]:
    """Every file of rows below a folder, for kind pt those of text, too; without hidden files and what `datasets` writes beside
    its rows."""
    formats = (*ROW_FORMATS, *_TEXT_FORMATS) if kind == "pt" else ROW_FORMATS
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file() and file_format(path.name) in formats)
    by_datasets = any(path.suffix == ".arrow" for path in found)
    kept = [
        str(path)
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not (by_datasets and path.name in ("dataset_info.json", "state.json", "dataset_dict.json"))
    ]
    if not kept:
        raise _NotFound(f"the folder has no file that ends in one of {', '.join(formats)}")
    return tuple(kept)


def _find_on_hub(name: str) -> tuple[str, ...]:
    """The files in which the library `datasets` keeps a data set of the hub, `NAME` or `NAME:SPLIT`; downloaded if need be.
    Raises _NotFound, with what the library says, if it cannot."""
    library = optional("datasets", "data sets of the hub", "datasets")
    data_set, _, split = name.partition(":")
    try:
        loaded = library.load_dataset(data_set, split=split or "train")
        files = tuple(entry["filename"] for entry in loaded.cache_files)
    except Exception as error:  # the library raises errors of many kinds, those of the network among them
        said = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise _NotFound(
            f"datasets cannot load it here ({said}); where it can, `load_dataset(...).save_to_disk(folder)` makes a folder"
        ) from None
    if not files:
        raise _NotFound("datasets keeps it in memory; `load_dataset(...).save_to_disk(folder)` makes a folder")
    return files


def _find_remote(pattern: str) -> tuple[str, ...]:
    """The addresses that a pattern means. Raises _NotFound, with what fsspec says, if there is none."""
    scheme = pattern.partition("://")[0]
    fsspec = optional("fsspec", f"files of {scheme}://")
    try:
        system, path = fsspec.core.url_to_fs(pattern)
        paths = sorted(system.glob(path)) if glob.has_magic(path) else [path] * system.isfile(path)
    except Exception as error:  # each file system raises errors of its own
        raise _NotFound(f"fsspec cannot find it: {str(error)[:200] or type(error).__name__}") from None
    if not paths:
        raise _NotFound("there is no such file")
    return tuple(system.unstrip_protocol(path) for path in paths)
