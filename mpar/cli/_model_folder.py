"""The folder of a model that a command was given: one of Hugging Face, or that of a finished run."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from mpar.cli._bind import bind
from mpar.errors import CheckpointError, ConfigError
from mpar.files import MAX_TABLE_BYTES, Unreadable, read_text
from mpar.train import ModelConfig, TrainConfig

__all__ = ["model_folder", "model_of_run"]


def model_of_run(run_dir: Path) -> ModelConfig | None:
    """How the run in this folder made its model; None if it is the folder of no run."""
    record = run_dir / "config.yaml"
    if not record.is_file():
        return None
    try:
        plain = yaml.safe_load(read_text(record, MAX_TABLE_BYTES))
    except (Unreadable, yaml.YAMLError) as error:
        raise CheckpointError(f"cannot read {record}: {error}") from None
    return bind(TrainConfig, plain).model if isinstance(plain, Mapping) and {"model", "steps"} <= set(plain) else None


def model_folder(path: Path, purpose: str = "generate from") -> Path:
    """The folder of Hugging Face that `path` is or has in hf/. Raises ConfigError if there is none, for this purpose."""
    for folder in (path, path / "hf"):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"cannot {purpose} {path}: neither it nor {path / 'hf'} has a config.json.\n"
        "Give an HF folder or the run_dir of a finished run; `mpar export run_dir=...` makes one from any checkpoint."
    )
