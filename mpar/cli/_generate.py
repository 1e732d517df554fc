"""`mpar generate`: answers `prompt`, or the questions that are typed on the terminal, each by itself."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpar.cli._arguments import read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._help import describe_config
from mpar.cli._screen import say, say_aside
from mpar.errors import CheckpointError
from mpar.train.export import answer

__all__ = ["GenerateConfig", "main"]

_HELP = "usage: mpar generate path=RUN_OR_HF_FOLDER [prompt='Who are you?'] [key=value] ..."


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The keys of `mpar generate`."""

    path: str = field(metadata={"doc": "an HF folder, or the run_dir of a run"})
    prompt: str | None = field(default=None, metadata={"doc": "the question; null: ask on the terminal"})
    max_new_tokens: int = field(default=128, metadata={"doc": "the most tokens of an answer"})
    temperature: float = field(default=0.0, metadata={"doc": "0 always takes the most likely token"})
    seed: int = field(default=0, metadata={"doc": "seed of the random draws of tokens"})


def main(args: Sequence[str]) -> int:
    """Answer; returns the exit code."""
    arguments = read_arguments(args)
    if arguments.help:
        say(f"{_HELP}\n\n{describe_config('generate', GenerateConfig, [], arguments.user_dir)}")
        return 0
    config, _ = compose_config("generate", GenerateConfig, arguments.overrides, arguments.user_dir)
    folder = _model_folder(Path(config.path))
    if config.prompt is not None:
        say(_answer(config, folder, config.prompt))
        return 0
    say_aside("Type a question; an empty line or the end of input stops. The model does not see earlier questions and answers.")
    for line in sys.stdin:
        if not line.strip():
            break
        say(_answer(config, folder, line.strip()))
    return 0


def _answer(config: GenerateConfig, folder: Path, question: str) -> str:
    return answer(folder, [question], max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed)[0]


def _model_folder(path: Path) -> Path:
    for folder in (path, path / "hf"):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"cannot generate from {path}: neither it nor {path / 'hf'} has a config.json.\n"
        "Give an HF folder or the run_dir of a finished run; `mpar export run_dir=...` makes one from any checkpoint."
    )
