"""`mpar generate`: answers `prompt`, or the questions that are typed on the terminal, each by itself."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._bind import bind
from mpar.cli._compose import compose_config
from mpar.cli._later import later
from mpar.cli._local_model import local_folder
from mpar.cli._screen import say, say_aside
from mpar.cli._switches import answer_switches
from mpar.errors import CheckpointError
from mpar.files import MAX_TABLE_BYTES, Unreadable, read_text
from mpar.train import ModelConfig, TrainConfig, key

__all__ = ["GenerateConfig", "main"]

_HELP = f"""usage: mpar generate path=RUN_OR_HF_FOLDER [prompt='Who are you?'] [key=value] ...

{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The keys of `mpar generate`."""

    path: str = key("an HF folder, or the run_dir of a run")
    prompt: str | None = key("the question, with any characters; null: ask on the terminal", default=None, prose=True)
    max_new_tokens: int = key("the most tokens of an answer", default=128, at_least=1)
    temperature: float = key("0 always takes the most likely token", default=0.0, at_least=0)
    seed: int = key("seed of the random draws of tokens", default=0, at_least=0, at_most=2**63 - 1)


def main(args: Sequence[str]) -> int:
    """Answer; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "generate", GenerateConfig):
        return 0
    config, _ = compose_config("generate", GenerateConfig, arguments.overrides, arguments.user_dir)
    folder = _model_folder(Path(local_folder(config.path)))
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
    answer, group = later("mpar.train.export").answer, _model_of_run(folder.parent)
    how = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature, "seed": config.seed}
    return answer(folder, [question], **how, group=group)[0]


def _model_of_run(run_dir: Path) -> ModelConfig | None:
    """How the run in this folder made its model; None if it is the folder of no run."""
    record = run_dir / "config.yaml"
    if not record.is_file():
        return None
    try:
        plain = yaml.safe_load(read_text(record, MAX_TABLE_BYTES))
    except (Unreadable, yaml.YAMLError) as error:
        raise CheckpointError(f"cannot read {record}: {error}") from None
    return bind(TrainConfig, plain).model if isinstance(plain, dict) and {"model", "steps"} <= set(plain) else None


def _model_folder(path: Path) -> Path:
    for folder in (path, path / "hf"):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"cannot generate from {path}: neither it nor {path / 'hf'} has a config.json.\n"
        "Give an HF folder or the run_dir of a finished run; `mpar export run_dir=...` makes one from any checkpoint."
    )
