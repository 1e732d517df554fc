"""Pages that mkdocs-gen-files makes whenever the site is built: the configuration, the Python API, and files of the root."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import mkdocs_gen_files

from mpar.cli._bind import describe
from mpar.cli._choices import choices
from mpar.cli._eval import EvalConfig
from mpar.cli._export import ExportConfig
from mpar.cli._generate import GenerateConfig
from mpar.cli._serve import ServeConfig
from mpar.train import TrainConfig, bounds_of

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "train": TrainConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
    "serve": ServeConfig,
    "export": ExportConfig,
}
API = {
    "Functions and steps": ("mpar", "mpar.program", "mpar.sharding", "mpar.ops"),
    "Meshes, specs, strategies": ("mpar.mesh", "mpar.spec", "mpar.strategy", "mpar.hardware", "mpar.precision"),
    "Models and their contract": ("mpar.chain", "mpar.models"),
    "Optimizers": ("mpar.optimizer", "mpar.optim"),
    "Schedules": ("mpar.schedules",),
    "Data, checkpoints, generation": ("mpar.data", "mpar.checkpoint", "mpar.infer"),
    "Tasks and rollouts": ("mpar.tasks", "mpar.rollouts"),
    "Errors": ("mpar.errors",),
}


def configuration() -> Iterator[str]:
    """The page of all configuration keys: one table for each group of each command."""
    yield "# Configuration\n"
    yield "Made from the dataclasses that a run is made of; `mpar COMMAND --help` prints the same, with the values composed.\n"
    known = choices(None)
    for command, cls in COMMANDS.items():
        yield f"## mpar {command}\n"
        if command == "train":
            yield "`mpar plan` has the same keys.\n"
            yield "| group | choices |\n| --- | --- |"
            for group in known.shown:
                yield f"| `{group}` | {_cell(known.line(group))} |"
            yield ""
        yield from _tables(cls, "", command)


def _tables(cls: type, prefix: str, title: str) -> Iterator[str]:
    """A table of the keys of a dataclass, then those of the groups in it."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    plain = [field for field in fields if not dataclasses.is_dataclass(hints[field.name])]
    if plain:
        yield f"### {title}\n"
        yield f"{(cls.__doc__ or '').strip()}\n"
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for field in plain:
            meaning = _cell(field.metadata.get("doc", ""))
            yield f"| `{prefix}{field.name}` | {_cell(_kind(field, hints[field.name]))} | {_default(field)} | {meaning} |"
        yield ""
    for field in fields:
        if field not in plain:
            yield from _tables(hints[field.name], f"{prefix}{field.name}.", f"{prefix}{field.name}")


def _kind(field: dataclasses.Field, hint: object) -> str:
    return ", ".join(words for words in (describe(hint), bounds_of(field)) if words)


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "set by `conf/`"
    return "null" if field.default is None else f"`{field.default!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def api_page(title: str, modules: tuple[str, ...]) -> str:
    """A page of the API: what these modules hand out, from their docstrings."""
    return f"# {title}\n\n" + "\n\n".join(f"## `{name}`\n\n::: {name}" for name in modules)


def of_root(name: str) -> str:
    """A file of the repository's root as a page: `docs/` is cut from links into that folder, other relative links become text."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)(?![\w/]+\.(?:md|svg)(?:#|\)))[^)]+\)", r"\1", text)


def write_all() -> None:
    """Write every generated page."""
    pages = {"configuration.md": "\n".join(configuration())}
    pages |= {f"api/{_slug(title)}.md": api_page(title, modules) for title, modules in API.items()}
    pages |= {f"{Path(name).stem.lower()}.md": of_root(name) for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    for path, text in pages.items():
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)


def _slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower()).strip("_")


write_all()
