"""`mpar export`: a checkpoint of a run as a folder that transformers loads."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mpar import checkpoint
from mpar.cli._arguments import read_arguments
from mpar.cli._bind import bind
from mpar.cli._compose import compose_config
from mpar.cli._screen import ByteProgress, say
from mpar.cli._switches import answer_switches
from mpar.errors import CheckpointError
from mpar.models import MAX_FILE_BYTES
from mpar.train import TrainConfig, make_tokenizer
from mpar.train.export import ExportOptions, export_adapter, export_hf

__all__ = ["ExportConfig", "main"]

_HELP = "usage: mpar export run_dir=RUN [checkpoint=FOLDER] [out=FOLDER] [dtype=bfloat16] [key=value] ..."


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The keys of `mpar export`."""

    run_dir: str = field(metadata={"doc": "the folder of a run"})
    checkpoint: str | None = field(default=None, metadata={"doc": "folder of the checkpoint; null: the newest of the run"})
    out: str | None = field(
        default=None, metadata={"doc": "the folder to write; null: hf or adapter in run_dir, which is replaced"}
    )
    dtype: Literal["source", "float32", "bfloat16", "float16"] = field(
        default="source",
        metadata={"doc": "source: as in the Hugging Face folder from which training started; without one, float32"},
    )
    max_file_bytes: int = field(
        default=MAX_FILE_BYTES, metadata={"doc": "a larger model has several files of weights", "at_least": 1}
    )
    format: Literal["hf", "peft"] = field(
        default="hf", metadata={"doc": "hf: the model, adapters added to its weights; peft: the adapter alone, as PEFT has it"}
    )
    check: bool = field(default=True, metadata={"doc": "read the folder back and compare every bit with the checkpoint"})
    progress: bool = field(default=True, metadata={"doc": "show a progress bar, on a terminal"})


def main(args: Sequence[str]) -> int:
    """Export; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "export", ExportConfig):
        return 0
    config, _ = compose_config("export", ExportConfig, arguments.overrides, arguments.user_dir)
    run_dir = Path(config.run_dir)
    source = Path(config.checkpoint) if config.checkpoint else checkpoint.latest(run_dir / "checkpoints")
    if source is None:
        raise CheckpointError(f"cannot export {run_dir}: it has no complete checkpoint; is it the run_dir of a run?")
    plain = checkpoint.read_extras(source).get("config")
    if not isinstance(plain, dict):
        raise CheckpointError(f"cannot export {source}: it does not record the configuration of a run. Did mpar train write it?")
    run = bind(TrainConfig, plain)
    out = Path(config.out) if config.out else run_dir / ("adapter" if config.format == "peft" else "hf")
    folder = Path(os.path.abspath(out)) if config.out else out  # x/.. would be another folder once x is made
    if config.out and folder.exists():
        raise CheckpointError(f"cannot export to {out}: it exists. Choose another folder, or delete it.")
    if config.format == "peft":
        if export_adapter(run, source, folder) is None:
            raise CheckpointError(f"cannot export an adapter from {source}: the run trained all weights. Use format=hf.")
        say(str(out))
        return 0
    options = ExportOptions(config.dtype, config.max_file_bytes, config.check, replaces=not config.out)
    with ByteProgress("export", shown=config.progress) as bar:
        export_hf(run, make_tokenizer(run), source, folder, options, bar)
    say(str(out))
    return 0
