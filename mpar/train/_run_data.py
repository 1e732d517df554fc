"""The data of a run: its tokenizer, the batches that it trains on, and those that it evaluates on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpar.checkpoint import Json
from mpar.data import Batches, DataConfig, Tokenizer, byte_tokenizer, load_dataset, write_malformed
from mpar.train._config import TrainConfig
from mpar.train._data_items import data_items
from mpar.train._setup import RunSetup
from mpar.train._sizes import batch_size, seq_len

__all__ = ["RunData", "load_data", "make_tokenizer", "training_data"]


@dataclass(frozen=True)
class RunData:
    """evaluation: batches whose order is fixed; None if the run does not evaluate. items: what `training` depends on.
    malformed_file: the list of malformed rows, if one was written.
    """

    tokenizer: Tokenizer
    training: Batches
    evaluation: Batches | None
    items: Mapping[str, Json]
    malformed_file: Path | None = None

    @property
    def all_batches(self) -> tuple[Batches, ...]:
        """Those to train on, then those to evaluate on, if there are any."""
        return (self.training,) if self.evaluation is None else (self.training, self.evaluation)

    @property
    def fingerprint(self) -> str:
        """Of all batches."""
        return " ".join(batches.fingerprint for batches in self.all_batches)

    @property
    def summary(self) -> str:
        """What became of the rows, in one line; more lines describe malformed rows, and data to evaluate on that are others."""
        lines = [f"data: {self.training.report}"]
        if self.evaluation is not None and not self.training.report.num_held_out:
            lines.append(f"data to evaluate on: {self.evaluation.report}")
        if self.malformed_file is not None:
            lines.append(f"malformed rows are listed in {self.malformed_file}")
        return "\n".join(lines)


def load_data(setup: RunSetup, cache_dir: Path | None = None, malformed_file: Path | None = None) -> RunData:
    """Read the data, and check them against the model's vocabulary. `cache_dir` keeps tokenised data if `data.cache_dir` is null.

    malformed_file: the file to list malformed rows in, which is written only if there are any.
    Raises what `load_dataset` and `Batches.split` raise.
    """
    config, evaluation = setup.config, setup.config.evaluation
    folder = config.data.cache_dir or (None if cache_dir is None else str(cache_dir))
    tokenizer, vocab_size = make_tokenizer(config), setup.model.vocab_size
    wanted = training_data(config, folder)
    batches, validation = load_dataset(wanted, tokenizer, vocab_size=vocab_size), None
    reports = [batches.report]
    if evaluation.sources is not None:
        fixed = _data_config(config, evaluation.sources, shuffle=False, cache_dir=folder)
        validation = load_dataset(fixed, tokenizer, vocab_size=vocab_size)
        reports.append(validation.report)
    elif evaluation.fraction is not None:
        batches, validation = batches.split(evaluation.fraction)
    written = malformed_file is not None and write_malformed(malformed_file, reports)
    items = data_items(config, tokenizer, batches)
    return RunData(tokenizer, batches, validation, items, malformed_file if written else None)


def training_data(config: TrainConfig, cache_dir: str | None) -> DataConfig:
    """The data that a run trains on, before some of them are held out."""
    data = config.data
    chosen = _data_config(config, data.sources, shuffle=data.shuffle, cache_dir=cache_dir)
    return replace(chosen, weights=data.weights, num_samples=data.num_samples or config.steps * batch_size(config))


def make_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; if that is null, of the model's folder; without a folder, bytes."""
    folder = config.data.tokenizer
    if folder is None and config.model.path is not None:
        folder = config.model.path
    return byte_tokenizer() if folder in (None, "bytes") else Tokenizer.from_folder(str(folder))


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
        token_weights=data.token_weights,
        system=data.system,
        model_name=data.model_name,
        model_author=data.model_author,
        cache_dir=cache_dir,
        strict=data.strict,
        columns=data.columns,
        preprocess=data.preprocess,
        stop=data.stop,
        isolate=data.isolate,
    )
