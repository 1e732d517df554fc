"""Folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`, with the names, layouts and entries that PEFT has."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from mpar import tree
from mpar.adapters._lora import LoRA
from mpar.adapters._model import AdaptedModel
from mpar.adapters._peft_config import lora_of_config, peft_config
from mpar.adapters._targets import saved_leaves
from mpar.errors import CheckpointError
from mpar.models import MappedFile, Model, StoredLeaf, Trainable, map_leaves_to_stored, open_weights, read_json, stored_leaves
from mpar.tree import Tree

__all__ = ["CONFIG", "WEIGHTS", "AdapterReader", "base_hash", "read_lora", "read_peft", "write_peft"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WORDS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_COPIED, _COPIES = ("embedding", "head"), (".weight", ".base_layer.weight")
"""PEFT writes the weight of an embedding, and of the head, beside an adapter of an embedding; it is that of the base."""
_OF_EMBEDDING = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def write_peft(
    model: AdaptedModel,
    leaves: Tree | Iterable[tuple[str, Tensor]],
    folder: str | os.PathLike[str],
    *,
    name: str = "default",
    base_name: str | None = None,
) -> None:
    """Write one adapter as PEFT does. `leaves` is a tree of parameters, or the leaves with their paths; others are not looked at.

    base_name: of the model or its folder, for `base_model_name_or_path`. Raises CheckpointError if the folder already has an
    adapter, or if leaves are missing.
    """
    path = Path(folder)
    if (path / WEIGHTS).exists():
        raise CheckpointError(f"cannot write an adapter to {path}: it already holds one; choose another folder")
    stored = stored_adapter(model, name)
    pairs = leaves if isinstance(leaves, Iterable) and not isinstance(leaves, Mapping) else tree.leaves_with_path(leaves)
    tensors: dict[str, Tensor] = {}
    missing = set(stored)
    for leaf_path, leaf in cast(Iterable[tuple[str, Tensor]], pairs):
        if leaf_path not in stored:
            continue
        entry = stored[leaf_path]
        for key in entry.names:
            tensors.setdefault(key, torch.empty(entry.stored_shape, dtype=leaf.dtype))
        entry.write(leaf.cpu(), tensors)
        missing.discard(leaf_path)
    if missing:
        raise CheckpointError(f"cannot write the adapter {name!r} to {path}: there are no values of {', '.join(sorted(missing))}")
    path.mkdir(parents=True, exist_ok=True)
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in sorted(tensors.items())}
    file = MappedFile(path / WEIGHTS, shapes, {"base": base_hash(model.base)})
    for key, x in tensors.items():
        file.tensors[key].copy_(x)
    file.sync()
    config = peft_config(model, name, base_name)
    (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_lora(folder: str | os.PathLike[str]) -> LoRA:
    """What the adapter in a folder is like. Raises CheckpointError for a folder without one, and for adapters of another kind."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"cannot read an adapter from {path}: it has no {CONFIG}")
    return lora_of_config(read_json(path / CONFIG), path)


def read_peft(model: AdaptedModel, folder: str | os.PathLike[str], base: Tree, *, name: str = "default") -> Tree:
    """The parameters of `model`, of which those of `base` are those of `model.base`, with the adapter in a folder as `name`."""
    with AdapterReader(model, folder, name) as reader:
        found = {path: reader.read_leaf(path) for path in reader.paths}
    like = model.abstract_params
    known = {**dict(tree.leaves_with_path(base)), **found}
    return tree.unflatten(tree.flatten(like)[1], [known[path] for path in tree.paths(like)])


class AdapterReader:
    """The adapter `name` of `model` in a folder. Making it reads headers only, and checks every name, shape and dtype.

    Raises CheckpointError, which lists all tensors that are missing, unexpected or of another shape. Use it in a `with`
    statement.
    """

    def __init__(self, model: AdaptedModel, folder: str | os.PathLike[str], name: str = "default") -> None:
        self.folder, self._model = Path(folder), model
        self._leaves = stored_adapter(model, name)
        self._file: Any = open_weights(self.folder / WEIGHTS)
        problems = self._problems()
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"cannot read the adapter in {self.folder}: it is not one of this {model.name} model:\n{lines}\n"
                "Name the model that it was trained with, or train an adapter of this one."
            )

    def __enter__(self) -> "AdapterReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves that it has."""
        return tuple(self._leaves)

    def read_leaf(self, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The leaf at `path`, or its elements within `slices`; only their bytes are read."""
        leaf = self._leaves[path]
        cuts = [slice(None)] * len(leaf.shape) if slices is None else slices
        bounds = [cut.indices(size)[:2] for size, cut in zip(leaf.shape, cuts, strict=True)]
        return leaf.read(lambda name, block: self._file.get_slice(name)[block], bounds)

    def _problems(self) -> list[str]:
        expected = {name: leaf.stored_shape for leaf in self._leaves.values() for name in leaf.names}
        found = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118 (it is no dict)
        problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
        copies = {f"{_PREFIX}{matrix.name}{end}" for matrix in self._model.matrices for end in _COPIES if matrix.kind in _COPIED}
        problems += [f"unexpected: {name} {shape}" for name, shape in found.items() if name not in {*expected, *copies}]
        problems += [
            f"shape: {name} is {found[name]}, the model asks for {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ]
        base = (self._file.metadata() or {}).get("base")
        if base is not None and base != base_hash(self._model.base):
            problems.append("base: it was trained with a model that has other parameters, by their names and shapes")
        return problems


def base_hash(base: Trainable) -> str:
    """A hash of the name of a model and of the names and shapes of its parameters."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(base.abstract_params)}
    return hashlib.blake2b(json.dumps([base.name, shapes]).encode(), digest_size=16).hexdigest()


def stored_adapter(model: AdaptedModel, name: str) -> dict[str, StoredLeaf]:
    """For the path of each leaf that belongs to the adapter `name`: where PEFT stores it."""
    lora = dict(model.adapters)[name]
    prefixes = _nesting(model, name)
    names: dict[str, tuple[str, str]] = {}
    for path, leaf in model.leaves.items():
        if path.split(".")[1] != name:
            continue
        matrix = leaf.adapted.matrix
        if matrix.kind == "parameter":
            key = f"{prefixes[matrix.name]}.{_WORDS[leaf.part]}"
        elif matrix.kind == "embedding":
            key = f"{matrix.name}.{_OF_EMBEDDING[leaf.part]}"
        else:
            key = f"{matrix.name}.{_WORDS[leaf.part]}"
        names[path] = (_PREFIX + key, leaf.text)
    shapes = {path: model.leaves[path].shape for path in names}
    stored = map_leaves_to_stored(names, shapes, model.vocab_size)
    if not isinstance(model.base, Model):
        return stored
    of_base = stored_leaves(model.base)
    trained = [*saved_leaves(model.base, lora), *model.trained_biases(name)]
    for path in trained:
        stored[path] = replace(of_base[path], names=tuple(_PREFIX + key for key in of_base[path].names))
    return stored


def _nesting(model: AdaptedModel, name: str) -> dict[str, str]:
    """Where PEFT has the adapters of parameters: it wraps the module once for each, the last one outermost."""
    of_module: dict[str, list[str]] = {}
    for adapted in model.adapted[name]:
        if adapted.matrix.kind == "parameter":
            of_module.setdefault(adapted.matrix.name.rpartition(".")[0], []).append(adapted.matrix.name)
    return {
        parameter: module + ".base_layer" * (len(parameters) - 1 - index)
        for module, parameters in of_module.items()
        for index, parameter in enumerate(parameters)
    }
