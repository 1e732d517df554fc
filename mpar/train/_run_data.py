"""The data of a run: its tokenizer, the batches that it trains on, and those that it evaluates on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpar.checkpoint import Json
from mpar.data import Batches, DataConfig, DocumentBatches, Progress, Tokenizer, byte_tokenizer, load_dataset, write_malformed
from mpar.rollouts import RolloutBatches
from mpar.train._config import TrainConfig
from mpar.train._data_items import data_items
from mpar.train._setup import RunSetup, reward_specs, rollout_plan
from mpar.train._sizes import batch_size, seq_len
from mpar.train._tasks import answers_of

__all__ = ["HELD_OUT", "RunData", "load_data", "make_tokenizer", "training_data"]

HELD_OUT = "held_out"
"""The name of the set that is held out of the data to train on."""


@dataclass(frozen=True)
class RunData:
    """evaluation: batches whose order is fixed, by the name of their set. items: what `training` depends on.
    malformed_file: the list of malformed rows, if one was written.
    """

    tokenizer: Tokenizer
    training: Batches
    evaluation: Mapping[str, Batches]
    items: Mapping[str, Json]
    malformed_file: Path | None = None

    @property
    def all_batches(self) -> tuple[Batches, ...]:
        """Those to train on, then those to evaluate on, if there are any."""
        return (self.training, *self.evaluation.values())

    def close(self) -> None:
        """End the processes that read ahead, until a batch is asked for."""
        for batches in self.all_batches:
            batches.close()

    @property
    def fingerprint(self) -> str:
        """Of all batches."""
        return " ".join(batches.fingerprint for batches in self.all_batches)

    @property
    def summary(self) -> str:
        """What became of the rows, in one line; more lines describe malformed rows, and data to evaluate on that are others."""
        so_far = " of a stream, so far" if self.training.steps_per_epoch is None else ""
        lines = [f"data{so_far}: {self.training.report}"]
        for name, batches in self.evaluation.items():
            if name != HELD_OUT:
                label = f" ({name})" if len(self.evaluation) > 1 else ""
                lines.append(f"data to evaluate on{label}: {batches.report}")
        if self.malformed_file is not None:
            lines.append(f"malformed rows are listed in {self.malformed_file}")
        return "\n".join(lines)


def load_data(
    setup: RunSetup, cache_dir: Path | None = None, malformed_file: Path | None = None, progress: Progress | None = None
) -> RunData:
    """Read the data, and check them against the model's vocabulary. `cache_dir` keeps tokenised data if `data.cache_dir` is null.

    malformed_file: the file to list malformed rows in, which is written only if there are any; those of a stream are listed while
    it is read (`MalformedFile`). progress: told of rows as they are read.
    Raises what `load_dataset` and `Batches.split` raise.
    """
    config, evaluation = setup.config, setup.config.evaluation
    folder = config.data.cache_dir or (None if cache_dir is None else str(cache_dir))
    tokenizer, vocab_size = make_tokenizer(config), setup.model.vocab_size
    wanted = training_data(config, folder)
    batches, sets = load_dataset(wanted, tokenizer, vocab_size=vocab_size, progress=progress), {}
    batches = _drawn(config, batches)
    if evaluation.fraction is not None:
        batches, sets[HELD_OUT] = batches.split(evaluation.fraction)
    for name, sources in evaluation.sets.items():
        fixed = _data_config(config, sources, shuffle=False, cache_dir=folder)
        sets[name] = _drawn(config, load_dataset(fixed, tokenizer, vocab_size=vocab_size, progress=progress))
    written = False
    if malformed_file is not None and batches.steps_per_epoch is not None:
        others = [of_set.report for name, of_set in sets.items() if name != HELD_OUT]
        written = write_malformed(malformed_file, [batches.report, *others])
    items = data_items(config, tokenizer, batches)
    return RunData(tokenizer, batches, sets, items, malformed_file if written else None)


def _drawn(config: TrainConfig, batches: Batches) -> Batches:
    """Batches of answers to prompts, if the run draws answers; else `batches`."""
    if not config.task.draws:
        return batches
    assert isinstance(batches, DocumentBatches)  # prompts are not streamed (`value_problems`)
    return RolloutBatches(batches, rollout_plan(config), rewards=_described(config))


def _described(config: TrainConfig) -> str:
    """What answers are worth that are learned from, and what replies to them, in words that change if it does; the code of
    rewards and environments is not looked at."""
    task = config.task
    rewards = repr(reward_specs(task) if task.learn != "gkd" else [])
    return rewards if task.environment is None else f"{rewards} {task.environment} {task.environment_options}"


def _longest_document(config: TrainConfig) -> int:
    """The most positions of a document: those of a row, of a prompt, or of a prompt with its answer."""
    if not config.task.draws:
        return seq_len(config)
    plan = rollout_plan(config)
    return plan.max_prompt_tokens + (plan.max_tokens if config.task.kind != "prompt" else 0)


def training_data(config: TrainConfig, cache_dir: str | None) -> DataConfig:
    """The data that a run trains on, before some of them are held out."""
    data = config.data
    chosen = _data_config(config, data.sources, shuffle=data.shuffle, cache_dir=cache_dir)
    num_samples = data.num_samples or config.steps * batch_size(config)
    return replace(chosen, weights=data.weights, stream=data.stream, num_samples=num_samples)


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
        seq_len=_longest_document(config),
        seed=config.seed,
        packing=data.packing,
        pad_to_multiple=data.pad_to_multiple,
        shuffle=shuffle,
        truncation=data.truncation,
        token_weights=data.token_weights,
        system=data.system,
        model_name=data.model_name,
        model_author=data.model_author,
        cache_dir=cache_dir,
        workers=data.workers,
        shuffle_rows=data.shuffle_rows,
        strict=data.strict,
        columns=data.columns,
        preprocess=data.preprocess,
        stop=data.stop,
        isolate=data.isolate,
        answers=answers_of(task),
    )
