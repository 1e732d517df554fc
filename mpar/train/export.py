"""After training: writes a checkpoint as a folder that transformers loads."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mpar import adapters, models, tree
from mpar.adapters import merged_leaf
from mpar.checkpoint import read_extras
from mpar.data import Tokenizer
from mpar.errors import CheckpointError
from mpar.models import HfReader, Model, Trainable
from mpar.quantised import is_quantised_folder
from mpar.train._adapters import adapted_part
from mpar.train._changes import function_changes, model_then
from mpar.train._config import TrainConfig
from mpar.train._quantised import dequantised
from mpar.train._setup import model_of, trained_model
from mpar.train._state import Progress, checkpoint_in, open_params

__all__ = ["DTYPES", "SOURCE", "ExportOptions", "export_adapter", "export_hf", "exportable"]

SOURCE = "source"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """dtype: one of DTYPES, or `source`: each tensor has the dtype that it has in the Hugging Face folder from which training
    started; for a run that started from fresh parameters float32, in which they are trained. max_file_bytes: a larger model has
    several files of weights. check: read the folder back, and compare every bit with the checkpoint. replaces: a folder that
    exists is replaced; else it is an error.
    """

    dtype: str = SOURCE
    max_file_bytes: int = models.MAX_FILE_BYTES
    check: bool = True
    replaces: bool = True


def export_hf(
    config: TrainConfig,
    tokenizer: Tokenizer,
    checkpoint: Path,
    folder: Path,
    options: ExportOptions = ExportOptions(),
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write weights, config and tokenizer into `folder`. A folder that exists is replaced once the new one is complete.

    config: that of the run. Of the weights, about one parameter is in memory at a time. `on_bytes` is called with (bytes of
    parameters that are done, bytes of all); a folder that is read back is counted twice.

    Adapters are added to the weights; `export_adapter` writes them alone.

    Raises CheckpointError if the checkpoint cannot be read, if there is no room, or if what was written is not what was trained.
    """
    config, trained = _as_trained(config, checkpoint)
    model = _exportable(trained)
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    leaves = _Leaves(trained, model, checkpoint, 2 if options.check else 1, on_bytes)
    try:
        models.write_hf(model, leaves.read(), draft, _dtypes(config, model, options.dtype), options.max_file_bytes)
        if options.check:
            models.compare_hf(model, leaves.read(), draft)
            if config.model.plugin is None:  # a plug-in makes the model, whatever config.json says
                _check_config(config, draft)
        tokenizer.save(draft)
        if folder.exists() and not options.replaces:
            raise CheckpointError(f"cannot export to {folder}: it was made meanwhile. Choose another folder, or delete it.")
        _put_in_place(draft, folder)
    except OSError as error:
        reason = f"{error.strerror or error}{'' if error.filename is None else f': {error.filename}'}"
        raise CheckpointError(f"cannot export {checkpoint} to {folder}: {reason}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def export_adapter(config: TrainConfig, checkpoint: Path, folder: Path) -> Path | None:
    """Write the adapters of a checkpoint as a folder of PEFT, which is replaced if it exists; None if the run has no adapters."""
    config, trained = _as_trained(config, checkpoint)
    adapted = adapted_part(trained)
    if adapted is None:
        return None
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    with open_params(trained, checkpoint) as read:
        paths = [path for path in tree.paths(adapted.abstract_params) if path in adapted.leaves or path not in adapted.frozen]
        adapters.write_peft(adapted, ((path, read(path)) for path in paths), draft, base_name=config.model.path)
    _put_in_place(draft, folder)
    return folder


def _put_in_place(draft: Path, folder: Path) -> None:
    """Rename `draft` to `folder`. What is there is deleted only then; of a link, the link."""
    _delete(old := folder.with_name(f".{folder.name}.old"))
    replaced = os.path.lexists(folder)
    if replaced:
        folder.rename(old)
    try:
        draft.rename(folder)
    except OSError:
        if replaced:
            old.rename(folder)
        raise
    _delete(old)


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


class _Leaves:
    """The parameters in a checkpoint, read one after the other as often as is asked for, while their bytes are counted.

    Adapters are added to the weights; quantised ones are dequantised before.
    """

    def __init__(
        self, trained: Trainable, model: Model, checkpoint: Path, times: int, on_bytes: Callable[[int, int], None]
    ) -> None:
        self._trained, self._model, self._checkpoint, self._on_bytes = trained, model, checkpoint, on_bytes
        self._done, self._total = 0, times * sum(leaf.nbytes for leaf in tree.leaves(model.abstract_params))

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its path."""
        adapted = adapted_part(self._trained)
        with open_params(self._trained, self._checkpoint) as read_leaf:
            read = dequantised(self._trained, read_leaf)
            for path in tree.paths(self._model.abstract_params):
                item = path, read(path) if adapted is None else merged_leaf(adapted, path, read)
                self._done += item[1].nbytes
                yield item
                del item  # else this one would stay in memory while the next is read
                self._on_bytes(self._done, self._total)


def _as_trained(config: TrainConfig, checkpoint: Path) -> tuple[TrainConfig, Trainable]:
    """`(config, model with its adapters)`, as the checkpoint records the model: the folder that it came from may be gone."""
    extras = read_extras(checkpoint)
    recorded = Progress.from_extras(extras, checkpoint).hf_config
    group = config.model
    if group.path is not None and recorded is not None and not (Path(group.path) / "config.json").is_file():
        config = replace(config, model=replace(group, path=None, config=dict(recorded)))
    model = trained_model(config)
    plain = extras.get("config")
    then = model_then(plain, recorded) if isinstance(plain, Mapping) else None
    changes = [] if then is None else function_changes(then, model)
    if changes:
        raise CheckpointError(
            f"cannot export {checkpoint}: the configuration describes another model than the one that was trained (then -> now):"
            "\n  " + "\n  ".join(changes) + f"\nIs {group.path or 'config.yaml'} as it was?"
        )
    return config, model


def _exportable(model: Trainable) -> Model:
    model = model.plain
    if not isinstance(model, Model):
        raise CheckpointError(
            f"cannot write {model.name} as a Hugging Face folder: it does not say how its parameters are called there.\n"
            "Its parameters are in the checkpoint, as safetensors."
        )
    return model


def _dtypes(config: TrainConfig, model: Model, dtype: str) -> dict[str, torch.dtype]:
    """The dtype of each stored tensor, by its name."""
    names = [name for leaf in models.stored_leaves(model).values() for name in leaf.names]
    if dtype != SOURCE:
        return dict.fromkeys(names, getattr(torch, dtype))
    source = None if config.model.random_init else config.model.path
    if config.init_from is not None and checkpoint_in(Path(config.init_from)) is None:
        source = config.init_from
    if source is None or not Path(source).is_dir() or is_quantised_folder(source):
        named = model.hf_config.get("dtype", model.hf_config.get("torch_dtype")) if source is not None else None
        return dict.fromkeys(names, getattr(torch, named) if named in DTYPES else torch.float32)
    with HfReader(model, source) as reader:
        dtypes = reader.dtypes
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    return {name: dtypes.get(name, usual) for name in names}


def _check_config(config: TrainConfig, folder: Path) -> None:
    """Raise CheckpointError unless config.json in `folder` describes the model of the run, so that equal weights are the same
    function.
    """
    read = model_of(replace(config.model, path=str(folder), config=None))
    changes = function_changes(model_of(config.model), read)
    if changes:
        raise CheckpointError(
            f"the config.json in {folder} is not that of the run (run -> config.json):\n  " + "\n  ".join(changes)
        )


def exportable(config: TrainConfig) -> bool:
    """Whether the model of the run can be written as a folder of Hugging Face: it says under which names, and has no adapter that
    cannot be added to its weights."""
    model = trained_model(config)
    adapted = adapted_part(model)
    return isinstance(model.plain, Model) and (adapted is None or adapters.can_merge(adapted))
