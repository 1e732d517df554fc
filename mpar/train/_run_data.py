"""The data of a run: its tokenizer, the batches that it trains on, and those that it evaluates on."""

from dataclasses import dataclass
from pathlib import Path

from mpar.data import Batches, DataConfig, Tokenizer, byte_tokenizer, load_dataset
from mpar.errors import ConfigError
from mpar.train._config import EvaluationConfig, TrainConfig
from mpar.train._setup import RunSetup, batch_size, seq_len

__all__ = ["RunData", "load_data", "make_tokenizer"]


@dataclass(frozen=True)
class RunData:
    """evaluation: batches whose order is fixed; None if the run does not evaluate."""

    tokenizer: Tokenizer
    training: Batches
    evaluation: Batches | None


def load_data(setup: RunSetup, cache_dir: Path | None = None) -> RunData:
    """Read the data, and check them against the model's vocabulary. `cache_dir` keeps tokenised data if `data.cache_dir` is null.

    Raises ConfigError if the keys of `evaluation` contradict each other, and what `load_dataset` and `Batches.split` raise.
    """
    config, evaluation = setup.config, setup.config.evaluation
    _check_evaluation(evaluation)
    folder = config.data.cache_dir or (None if cache_dir is None else str(cache_dir))
    tokenizer, vocab_size = make_tokenizer(config), setup.model.vocab_size
    wanted = _data_config(config, config.data.sources, shuffle=config.data.shuffle, cache_dir=folder)
    batches = load_dataset(wanted, tokenizer, vocab_size=vocab_size)
    if evaluation.sources is not None:
        fixed = _data_config(config, evaluation.sources, shuffle=False, cache_dir=folder)
        return RunData(tokenizer, batches, load_dataset(fixed, tokenizer, vocab_size=vocab_size))
    if evaluation.fraction is not None:
        return RunData(tokenizer, *batches.split(evaluation.fraction))
    return RunData(tokenizer, batches, None)


def make_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; if that is null, of the model's folder; without a folder, bytes."""
    folder = config.data.tokenizer
    if folder is None and config.model.path is not None:
        folder = config.model.path
    return byte_tokenizer() if folder in (None, "bytes") else Tokenizer.from_folder(str(folder))


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    counts = {"every": evaluation.every, "batches": evaluation.batches}
    wrong = [f"evaluation.{name}={count} is below 1" for name, count in counts.items() if count is not None and count < 1]
    if evaluation.sources is not None and evaluation.fraction is not None:
        wrong.append("evaluation.sources and evaluation.fraction are both given: choose one")
    if evaluation.every is not None and evaluation.sources is None and evaluation.fraction is None:
        wrong.append(
            f"evaluation.every={evaluation.every} has no data: give evaluation.fraction (such as 0.1, the share of data.sources "
            "that is held out) or evaluation.sources"
        )
    if wrong:
        raise ConfigError("cannot evaluate:\n" + "\n".join(wrong))


def _data_config(config: TrainConfig, sources: tuple[str, ...], *, shuffle: bool, cache_dir: str | None) -> DataConfig:
    data, task = config.data, config.task
    return DataConfig(
        kind=task.kind,
        sources=sources,
        batch_size=batch_size(config),
        seq_len=seq_len(config),
        seed=config.seed,
        packing=data.packing,
        shuffle=shuffle,
        truncation=data.truncation,
        loss=task.loss,
        system=data.system,
        model_name=data.model_name,
        model_author=data.model_author,
        cache_dir=cache_dir,
    )
