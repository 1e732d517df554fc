"""`mpar export`: a checkpoint of a run as a folder that transformers loads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mpar import checkpoint
from mpar.cli._arguments import read_arguments
from mpar.cli._bind import bind
from mpar.cli._compose import compose_config
from mpar.cli._help import describe_config
from mpar.cli._screen import say
from mpar.errors import CheckpointError
from mpar.train import TrainConfig, make_setup, make_tokenizer
from mpar.train.export import export_hf

__all__ = ["ExportConfig", "main"]

_HELP = "usage: mpar export run_dir=RUN [checkpoint=FOLDER] [out=FOLDER]"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The keys of `mpar export`."""

    run_dir: str = field(metadata={"doc": "the folder of a run"})
    checkpoint: str | None = field(default=None, metadata={"doc": "folder of the checkpoint; null: the newest of the run"})
    out: str | None = field(default=None, metadata={"doc": "the folder to write; null: run_dir/hf, which is replaced"})


def main(args: Sequence[str]) -> int:
    """Export; returns the exit code."""
    arguments = read_arguments(args)
    if arguments.help:
        say(f"{_HELP}\n\n{describe_config('export', ExportConfig, [], arguments.user_dir)}")
        return 0
    config, _ = compose_config("export", ExportConfig, arguments.overrides, arguments.user_dir)
    run_dir = Path(config.run_dir)
    source = Path(config.checkpoint) if config.checkpoint else checkpoint.latest(run_dir / "checkpoints")
    saved = run_dir / "config.yaml"
    if source is None or not saved.is_file():
        missing = "config.yaml" if source is not None else "complete checkpoint"
        raise CheckpointError(f"cannot export {run_dir}: it has no {missing}; is it the run_dir of a run?")
    run = bind(TrainConfig, yaml.safe_load(saved.read_text(encoding="utf-8")))
    out = Path(config.out) if config.out else run_dir / "hf"
    if config.out and out.exists():
        raise CheckpointError(f"cannot export to {out}: it exists. Choose another folder, or delete it.")
    say(str(export_hf(make_setup(run).model, make_tokenizer(run), source, out)))
    return 0
