"""What the batches of a run depend on, item by item, so that a refusal can say which of them differ."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from mpar.checkpoint import Json
from mpar.data import Batches, Tokenizer
from mpar.errors import CheckpointError
from mpar.train._config import TrainConfig

__all__ = ["BATCH_SIZE", "data_items", "unlike_data"]

BATCH_SIZE = "data.batch_size"
_SEQ_LEN, _ROWS, _TOKENIZER, _TEMPLATE = "data.seq_len", "rows", "tokenizer", "chat template"
_ROWS_OF = "rows of "
_OF_BATCHES = (
    *(BATCH_SIZE, _SEQ_LEN, "data.packing", "data.pad_to_multiple", "data.shuffle", "seed", "padding id"),
    *("task.learn", "task.answers"),
)
"""The items that batches depend on besides documents. All other items matter only as far as they change the documents."""
_WORDS = {
    _ROWS: "data.sources: the same names, but other rows are in the files",
    _TOKENIZER: "tokenizer: another one",
    _TEMPLATE: "chat template: another one",
}


def data_items(config: TrainConfig, tokenizer: Tokenizer, batches: Batches) -> dict[str, Json]:
    """Everything that the batches depend on, by the name of its key where it has one; long texts and documents as hashes."""
    data, task, shape, template = config.data, config.task, batches.shape, tokenizer.template
    return {
        BATCH_SIZE: shape.batch_size,
        _SEQ_LEN: shape.seq_len,
        "data.packing": shape.packing,
        "data.pad_to_multiple": shape.pad_to_multiple if shape.pad_to_multiple > 1 else None,
        "data.shuffle": batches.shuffle,
        "seed": batches.seed,
        "padding id": batches.pad_id,
        "data.sources": list(data.sources),
        "data.columns": dict(data.columns) or None,
        "data.preprocess": data.preprocess,
        "data.weights": None if data.weights is None else list(data.weights),
        "data.stop": None if data.weights is None else data.stop,
        "data.truncation": data.truncation,
        "data.token_weights": None if data.token_weights == "default" else data.token_weights,
        "data.system": data.system,
        "data.model_name": _listed(data.model_name),
        "data.model_author": _listed(data.model_author),
        "data.stream": data.stream or None,
        "data.shuffle_rows": data.shuffle_rows if data.stream else None,
        "evaluation.fraction": config.evaluation.fraction,
        "task.kind": task.kind,
        "task.learn": None if batches.shape.answers is None else task.learn,
        "task.answers": None if batches.shape.answers is None else task.answers,
        _TOKENIZER: tokenizer.text_fingerprint,
        _TEMPLATE: None if template is None else hashlib.sha256(template.source.encode()).hexdigest(),
        _ROWS: batches.data_fingerprint,
        **{_ROWS_OF + name: digest for name, digest in batches.facts.items()},
    }


def unlike_data(path: Path, then: Mapping[str, Json], now: Mapping[str, Json]) -> CheckpointError:
    """The error because the data `then` of the checkpoint at `path` are not the data `now`; it names the items that differ.

    then: empty for a checkpoint of an older version, which does not have them.
    """
    if then:
        differ = " (then -> now):\n  " + "\n  ".join(_differences(then, now))
    else:
        differ = ", or with another batch size, sequence length or seed; this checkpoint does not record which."
    return CheckpointError(
        f"cannot go on from {path}: its run was trained on other data{differ}\n"
        "Restore these settings (config.yaml in the run_dir has them). Or let the present data begin at their start while steps "
        "go on: resume.data=restart. Or begin a new run with these weights: init_from= with a new run_dir."
    )


def _differences(then: Mapping[str, Json], now: Mapping[str, Json]) -> list[str]:
    different = [name for name in now if then.get(name) != now[name]]
    if _ROWS not in different:  # then the others have not changed any document
        different = [name for name in different if name in _OF_BATCHES]
    elif any(name == _SEQ_LEN or name not in (*_OF_BATCHES, _ROWS) for name in different):
        different.remove(_ROWS)  # the others explain it
    return [_in_words(name, then.get(name), now[name]) for name in different]


def _in_words(name: str, then: Json, now: Json) -> str:
    """How an item differs."""
    if name.startswith(_ROWS_OF):
        return f"{name.removeprefix(_ROWS_OF)}: {'other rows are in its files' if then else 'was not a source'}"
    return _WORDS.get(name, f"{name}: {then} -> {now}")


def _listed(value: str | tuple[str, str] | None) -> Json:
    return list(value) if isinstance(value, tuple) else value
