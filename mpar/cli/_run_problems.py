"""Everything that is wrong with a run before it begins, found without compiling, reading data, or loading torch."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpar.cli._bind import Check, bind, nearest_value
from mpar.cli._compose import compose_plain
from mpar.cli._local_model import config_file, local_folder, weight_problems
from mpar.data import find_sources
from mpar.errors import MparError
from mpar.preset_names import PRESET_NAMES
from mpar.schedules import SCHEDULES
from mpar.train import PlainConfig, PlainValue, TrainConfig, plug_ins, value_problems, within_bounds

__all__ = ["bind_run", "compose_run", "data_problems", "plan_problems", "run_problems"]

_RANK_BYTES = 150 * 2**20  # what a process with torch holds at least


def compose_run(overrides: Sequence[str], user_dir: Path | None, check: Check[TrainConfig]) -> tuple[TrainConfig, PlainConfig]:
    """The run that `overrides` describe: bound, and as the plain data that it saves. Raises ConfigError, with all values of
    a wrong type or size, and all that `check` finds.
    """
    return bind_run(compose_plain("train", TrainConfig, overrides, user_dir), check)


def bind_run(plain: PlainConfig, check: Check[TrainConfig]) -> tuple[TrainConfig, PlainConfig]:
    """The same of a composed configuration. Models of the hub that are in its local cache are replaced by their folders."""
    plain = plain | {group: _with_folders(plain.get(group), key) for group, key in (("model", "path"), ("data", "tokenizer"))}
    return bind(TrainConfig, plain, check), plain


def _with_folders(group: PlainValue, key: str) -> PlainValue:
    path = group.get(key) if isinstance(group, dict) else None
    return group | {key: local_folder(path)} if isinstance(group, dict) and isinstance(path, str) else group


def data_problems(config: TrainConfig) -> list[str]:
    """A line for everything that keeps the data of a run from being read: sources, and folders of tokenizers."""
    tokenizer = config.data.tokenizer
    missing = tokenizer not in (None, "bytes") and not Path(str(tokenizer)).is_dir()
    return [*_of_sources(config), *[f"data.tokenizer={tokenizer}: there is no such folder"] * missing]


def run_problems(config: TrainConfig) -> list[str]:
    """A line for everything that keeps `mpar train` from starting: values, files, memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        *_unknown_names(config),
        *value_problems(config, memory_bytes),
        *_of_ranks(config, memory_bytes),
        *_of_model_folder(config, weights=not config.model.random_init),
        *_of_sources(config),
        *_of_paths(config),
        *_of_packages(config),
        *_of_plug_ins(config),
    ]


def plan_problems(config: TrainConfig) -> list[str]:
    """A line for everything that keeps `mpar plan` from starting: values, and the config.json of the model."""
    return [*_unknown_names(config), *value_problems(config), *_of_model_folder(config, weights=False), *_of_plug_ins(config)]


def _unknown_names(config: TrainConfig) -> Iterator[str]:
    schedules = [name for name in (*SCHEDULES, "auto") if name != "forward_only"]
    if config.schedule.table is None and config.schedule.name == "forward_only":
        yield "schedule.name=forward_only: cannot train with it, because it has no backwards"
        schedules.append("forward_only")
    for key, name, names in (
        ("schedule.name", config.schedule.name, schedules),
        ("strategy.name", config.strategy.name, PRESET_NAMES),
    ):
        if name not in names:
            yield f"{key}={name}: there is none; did you mean {nearest_value(key, name, names)}? ({', '.join(names)})"


def _of_ranks(config: TrainConfig, memory_bytes: int) -> Iterator[str]:
    if not within_bounds(config.mesh):
        return
    mesh, local = config.mesh, os.environ.get("LOCAL_WORLD_SIZE")
    ranks = int(local) if local else mesh.pp * mesh.dp * mesh.fsdp * mesh.cp * mesh.tp
    if ranks * _RANK_BYTES > memory_bytes:
        yield (
            f"mesh: {ranks:,} ranks on this machine need at least {ranks * _RANK_BYTES / 2**30:,.1f} GiB, and it has "
            f"{memory_bytes / 2**30:,.1f} GiB of memory; use a smaller mesh, or torchrun on several machines"
        )


def _of_model_folder(config: TrainConfig, *, weights: bool) -> Iterator[str]:
    path = config.model.path
    if path is None:
        return
    yield from _refusal("model.path", path, lambda: config_file(path))
    if weights:
        yield from weight_problems(Path(path))


def _of_sources(config: TrainConfig) -> Iterator[str]:
    kind = config.task.kind
    yield from _refusal("data.sources", list(config.data.sources), lambda: find_sources(kind, config.data.sources))
    for name, sources in config.evaluation.sets.items():
        label = f"evaluation.sources.{name}" if isinstance(config.evaluation.sources, dict) else "evaluation.sources"
        yield from _refusal(label, list(sources), lambda sources=sources: find_sources(kind, sources))  # type: ignore[misc]


def _refusal(key: str, value: object, find: Callable[[], object]) -> Iterator[str]:
    """A line if `find` raises an MparError; the key and its value come first."""
    try:
        find()
    except MparError as error:
        yield f"{key}={value}: {' '.join(str(error).splitlines())}"


def _of_paths(config: TrainConfig) -> Iterator[str]:
    for key, folder in {"run_dir": config.run_dir or "runs", "data.cache_dir": config.data.cache_dir}.items():
        if folder is not None:
            yield from _unwritable(key, Path(folder))
    tokenizer, table = config.data.tokenizer, config.schedule.table
    if tokenizer not in (None, "bytes") and not Path(tokenizer).is_dir():
        yield f"data.tokenizer={tokenizer}: there is no such folder; it is `bytes`, or a folder with a tokenizer"
    if table is not None and not Path(table).is_file():
        yield f"schedule.table={table}: there is no such file"
    for key, folder in {"model.path": config.model.path, "data.tokenizer": tokenizer, "init_from": config.init_from}.items():
        if folder is not None and config.run_dir is not None and Path(folder).resolve() == Path(config.run_dir, "hf").resolve():
            yield f"{key}={folder}: the run would replace this folder by its own model when it ends; choose another run_dir"
    path, parameters = config.resume.path, config.init_from
    if path not in ("auto", "never") and not Path(path).is_dir():
        yield f"resume={path}: there is no such folder; it is auto, never, weights, or the folder of a checkpoint or run"
    if parameters is not None and not Path(parameters).is_dir():
        yield f"init_from={parameters}: there is no such folder; it is that of a run, a checkpoint, or Hugging Face weights"


def _of_packages(config: TrainConfig) -> Iterator[str]:
    if config.wandb and importlib.util.find_spec("wandb") is None:
        yield "wandb=true: the package wandb is not installed; pip install wandb, or mpar[track]"


def _of_plug_ins(config: TrainConfig) -> list[str]:
    """A line for everything that is wrong with the plug-ins and their parameters. Importing them may load torch."""
    return [line for plug_in in plug_ins(config) for line in plug_in.problems()]


def _unwritable(key: str, folder: Path) -> Iterator[str]:
    """A line if nothing can be written into `folder`, or the folder cannot be made."""
    absolute = folder.absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not there.is_dir():
        yield f"{key}={folder}: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{key}={folder}: cannot write into {there}: permission denied; choose another folder"
