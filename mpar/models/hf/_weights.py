"""Hugging Face weights: reading any slice of any leaf from sharded safetensors, and writing a folder that transformers loads.

Which stored tensors a leaf is made of is in the `names` of its architecture; `_weight_map.py` says what can be written there.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpar import tree
from mpar.errors import CheckpointError, ShapeError, ShardingError
from mpar.mesh import Mesh
from mpar.models._model import Model
from mpar.models.hf._weight_map import StoredLeaf, map_leaves_to_stored
from mpar.spec import P, check_spec

__all__ = ["HfReader", "hf_tensors", "load_params", "read_json", "shard_slices", "stored_leaves", "to_hf"]

MAX_FILE_BYTES = 5 * 10**9
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class HfReader:
    """The weights of `model` in `folder`. Opening it reads headers only and compares every name, shape and dtype.

    Raises CheckpointError that lists all missing, unexpected and mis-shaped tensors. Use it in a `with` statement.
    """

    def __init__(self, model: Model, folder: str | os.PathLike[str]) -> None:
        self.model, self.folder = model, Path(folder)
        self._files: dict[str, Any] = {}
        self._where, self._base_less = _with_base(_locate(self.folder), model)
        self._leaves = stored_leaves(model)
        problems, self._dtypes = self._compare()
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(f"the weights in {self.folder} are not those of this {model.name} model:\n{lines}")

    def __enter__(self) -> "HfReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.clear()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored tensors; if they differ, the narrowest that holds them all."""
        found = sorted(set(self._dtypes.values()), key=str)
        widest = found[0]
        for dtype in found[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    def read_leaf(self, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The leaf at `path`, or the part of it within `slices` (one per dim, no steps): only its bytes are read.

        Padding rows are zero. The dtype is that of the stored tensor.
        """
        leaf = self._leaves[path]
        shape = leaf.shape
        parts = [slice(None)] * len(shape) if slices is None else slices
        if len(parts) != len(shape) or any(part.step not in (None, 1) for part in parts):
            raise ShapeError(f"cannot read {path} {shape} by {tuple(parts)}: give one slice without a step for each dim")
        bounds = [part.indices(size)[:2] for size, part in zip(shape, parts, strict=True)]
        return leaf.read(lambda name, block: self._slice(name)[block], [(start, max(start, stop)) for start, stop in bounds])

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(self._base_less.get(name, name))

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {self.folder / file}: {error}") from error
        return self._files[file]

    def _compare(self) -> tuple[list[str], dict[str, torch.dtype]]:
        expected = {name: leaf.stored_shape for leaf in self._leaves.values() for name in leaf.names}
        further = {name for path, leaf in self._leaves.items() if path.startswith("mtp.") for name in leaf.names}
        none_of_it = further and further.isdisjoint(self._where)
        problems = [
            f"missing: {name} {shape}"
            for name, shape in expected.items()
            if name not in self._where and not (none_of_it and name in further)
        ]
        if none_of_it:
            layer = f"{self.model.architecture.base}layers.{self.model.config.num_layers}"
            problems.append(f"missing: all of {layer}, the layer for further tokens; without mtp_loss_weight it is not needed")
        absent = _absent(self.model)
        problems += [f"unexpected: {name}" for name in self._where if name not in expected and not absent.fullmatch(name)]
        dtypes = {}
        held: dict[str, frozenset[str]] = {}
        for name, shape in expected.items():
            if name not in self._where:
                continue
            file = self._where[name]
            if file not in held:
                held[file] = frozenset(self._open(file).keys())
            if self._base_less.get(name, name) not in held[file]:
                problems.append(f"missing: {name} is not in {file}, where the index says it is")
                continue
            stored = self._slice(name)
            if tuple(stored.get_shape()) != shape:
                problems.append(f"shape: {name} is {tuple(stored.get_shape())}, the config asks for {shape}")
            if stored.get_dtype() not in _DTYPES:
                problems.append(f"dtype: {name} is {stored.get_dtype()}; only {', '.join(_DTYPES)} are implemented")
            else:
                dtypes[name] = _DTYPES[stored.get_dtype()]
        return problems, dtypes


def load_params(
    model: Model,
    folder: str | os.PathLike[str],
    specs: Any = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> Any:
    """The parameters in `folder`; with `specs` (a tree of P) and `mesh` the local shards of `rank`, whose bytes alone are read.

    `dtype` is by default that of `model`. Raises CheckpointError, and ShardingError with all leaves that `specs` cannot place.
    """
    like = model.abstract_params
    paths, dtype = tree.paths(like), dtype or model.dtype
    cuts: list[tuple[slice, ...] | None] = [None] * len(paths)
    if specs is not None:
        if mesh is None:
            raise ShardingError("cannot load shards: specs are given but no mesh; pass mesh=Mesh(...) or leave specs out")
        placed = [tree.get(specs, path) for path in paths]
        shapes = [tuple(leaf.shape) for leaf in tree.leaves(like)]
        problems = [line for triple in zip(paths, shapes, placed, strict=True) for line in check_spec(*triple, mesh)]
        if problems:
            raise ShardingError(f"cannot load shards on {mesh}:\n" + "\n".join(f"  {line}" for line in problems))
        cuts = [shard_slices(shape, spec, mesh, rank) for shape, spec in zip(shapes, placed, strict=True)]
    with HfReader(model, folder) as reader:
        leaves = [reader.read_leaf(path, cut).to(dtype) for path, cut in zip(paths, cuts, strict=True)]
    return tree.unflatten(tree.flatten(like)[1], leaves)


def shard_slices(shape: Sequence[int], spec: P, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Where the shard of `rank` lies in a tensor of global `shape`."""
    slices = []
    for dim, size in enumerate(shape):
        part = size // mesh.axis_size(spec.dim(dim))
        start = part * mesh.index(rank, spec.dim(dim))
        slices.append(slice(start, start + part))
    return tuple(slices)


def hf_tensors(model: Model, params: Any) -> dict[str, Tensor]:
    """Parameters, or anything of their shapes such as gradients, under their Hugging Face names; padding rows dropped.

    A tied embedding appears once, under the embedding's name. Raises ShapeError if a leaf is not whole.
    """
    tensors: dict[str, Tensor] = {}
    for path, stored in stored_leaves(model).items():
        leaf = tree.get(params, path)
        if tuple(leaf.shape) != stored.shape:
            raise ShapeError(
                f"cannot write {path} as {stored.names[0]}: it is {tuple(leaf.shape)}, the model's is {stored.shape}; "
                "gather shards first"
            )
        stored.write(leaf, tensors)
    return tensors


def to_hf(model: Model, params: Any, path: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a folder that transformers loads: weights in files of at most `max_file_bytes`, an index if there are several,
    config.json with all keys of the original one, generation_config.json if it is known. Where the architecture has layers for
    further tokens, their number in config.json is that of the folder.

    Raises CheckpointError if the folder has weights already: stale files of another split would be loaded with the new ones.
    """
    folder = Path(path)
    old = sorted(file.name for file in folder.glob("*.safetensors*")) if folder.is_dir() else []
    if old:
        raise CheckpointError(
            f"cannot export to {folder}: it holds weights already ({', '.join(old[:3])}); choose another folder"
        )
    tensors = hf_tensors(model, params)
    folder.mkdir(parents=True, exist_ok=True)
    files = _split(tensors, max_file_bytes)
    for file, names in files.items():
        save_file({name: tensors[name].detach().cpu() for name in names}, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    if model.hf_generation_json is not None:
        _write_json(folder / "generation_config.json", json.loads(model.hf_generation_json))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    dtype_key = next((key for key in ("dtype", "torch_dtype") if key in model.hf_config), "torch_dtype")
    own = {"architectures": [model.architecture.hf_class], dtype_key: dtype, **_layers_behind(model)}
    _write_json(folder / "config.json", {**model.hf_config, **own})


def _layers_behind(model: Model) -> dict[str, int]:
    """The entry of config.json that counts layers for further tokens, which readers take to be 1 where it is left out."""
    key = model.architecture.layers_behind
    return {} if key is None else {key: 0 if model.config.multi_token is None else 1}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {file}: it holds a {type(value).__name__}, not an object")
    return value


def stored_leaves(model: Model) -> dict[str, StoredLeaf]:
    """Path of each leaf to where it is stored."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(model.abstract_params)}
    behind = str(model.config.num_layers)  # the index of the first layer behind the last one
    names = {path: (name.replace("{n}", behind), transform) for path, (name, transform) in model.architecture.names.items()}
    return map_leaves_to_stored(names, shapes, model.vocab_size)


def _absent(model: Model) -> re.Pattern[str]:
    """Matches stored names that carry nothing: old buffers, and the head of a tied model, which transformers ignores too."""
    names = [re.escape(name).replace(r"\{i\}", r"\d+") for name in model.architecture.absent]
    if model.config.tied:
        names.append(re.escape(model.architecture.names["head.head_DV"][0]))
    if model.architecture.layers_behind is not None:
        ours = "|".join(str(i) for i in range(model.config.num_layers))
        names.append(rf"{re.escape(model.architecture.base)}layers\.(?!(?:{ours})\.)\d+\..*")
    return re.compile("|".join(names))


def _with_base(where: dict[str, str], model: Model) -> tuple[dict[str, str], dict[str, str]]:
    """`where` by full names; and full name -> name in the file, for a bare decoder's checkpoint, whose names lack their base."""
    base = model.architecture.base
    if any(name.startswith(base) for name in where):
        return where, {}
    stored = {base + name: name for name in where}
    return {name: where[old] for name, old in stored.items()}, stored


def _locate(folder: Path) -> dict[str, str]:
    """Name of each tensor to the file that holds it."""
    if (folder / _INDEX).is_file():
        where = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(where, dict) or any(not isinstance(f, str) or Path(f).name != f for f in where.values()):
            raise CheckpointError(f"cannot read {folder / _INDEX}: weight_map must map names to files in the same folder")
        gone = sorted({file for file in where.values() if not (folder / file).is_file()})
        if gone:
            raise CheckpointError(f"cannot read {folder}: the index names files that are not there: {', '.join(gone)}")
        return dict(where)
    if not (folder / _SINGLE).is_file():
        there = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) if folder.is_dir() else "nothing: it is no folder"
        raise CheckpointError(
            f"cannot read weights from {folder}: no {_SINGLE} and no {_INDEX}; it has {there}.\n"
            "Pickled weights (.bin, .pt) are not read; convert them to safetensors first."
        )
    try:
        with safe_open(folder / _SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / _SINGLE}: {error}") from error


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, list[str]]:
    """File names to the tensors in them, in order; a tensor larger than `max_bytes` has a file of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if groups[-1] and used + tensor.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += tensor.nbytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
