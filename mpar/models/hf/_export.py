"""Writing a folder that transformers can load, leaf by leaf: of the weights only the leaf that is being written is in memory."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import CheckpointError, ShapeError
from mpar.models._model import Model
from mpar.models.decoder import DecoderParams
from mpar.models.hf._folder import INDEX, SINGLE, write_json
from mpar.models.hf._mapped_file import MappedFile
from mpar.models.hf._reader import HfReader
from mpar.models.hf._stored import stored_leaves
from mpar.models.hf._weight_map import StoredLeaf

__all__ = ["MAX_FILE_BYTES", "QUANTISATION", "compare_hf", "hf_tensors", "to_hf", "write_hf"]

MAX_FILE_BYTES = 5 * 10**9
QUANTISATION = "quantization_config"
"""The key of a config.json whose folder has quantised weights. What is written here are whole ones."""
_SLAB_BYTES = 64 * 2**20

Leaves = Iterable[tuple[str, Tensor]]
"""The global leaves of a model with their paths, each once, in any order; they may be read one by one."""


def hf_tensors(model: Model, params: DecoderParams[Tensor]) -> dict[str, Tensor]:
    """`params` under their Hugging Face names, without padding; it may be any tree of the same shapes, such as gradients.

    A tied embedding appears once, under the embedding's name. Raises ShapeError if a leaf does not have its global shape.
    """
    tensors: dict[str, Tensor] = {}
    for path, stored in stored_leaves(model).items():
        leaf = tree.get(params, path)
        for name in stored.names:
            tensors.setdefault(name, leaf.new_empty(stored.stored_shape))
        _write(path, leaf, stored, tensors)
    return tensors


def to_hf(
    model: Model, params: DecoderParams[Tensor], path: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a folder that transformers can load, with the dtypes of `params`. What it has, and what is raised: see `write_hf`."""
    leaves = tree.leaves_with_path(params)
    stored = stored_leaves(model)
    write_hf(
        model, leaves, path, {name: leaf.dtype for leaf_path, leaf in leaves for name in stored[leaf_path].names}, max_file_bytes
    )


def write_hf(
    model: Model,
    leaves: Leaves,
    path: str | os.PathLike[str],
    dtypes: Mapping[str, torch.dtype],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that transformers can load. Of the weights, only one of `leaves` is in memory at a time.

    dtypes: the dtype of each stored tensor by its name, to which leaves are rounded.

    The folder has the weights in files of at most `max_file_bytes`, an index if there are several files, a config.json with all
    keys of the original one, and generation_config.json if the model came with one. If the architecture has layers for further
    tokens, config.json says how many of them are in the folder.

    Raises CheckpointError if the folder already has weights, because old files could be loaded together with the new ones, or if
    there is no room for the files; ShapeError if a leaf does not have its global shape, or is missing.
    """
    folder, stored = Path(path), stored_leaves(model)
    old = sorted(file.name for file in folder.glob("*.safetensors*")) if folder.is_dir() else []
    if old:
        raise CheckpointError(
            f"cannot export to {folder}: it already holds weights ({', '.join(old[:3])}); choose another folder"
        )
    shapes = {name: leaf.stored_shape for leaf in stored.values() for name in leaf.names}
    sizes = {name: dtypes[name].itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = _split(sizes, max_file_bytes)
    mapped = [MappedFile(folder / file, {name: (shapes[name], dtypes[name]) for name in names}) for file, names in files.items()]
    tensors = {name: tensor for file in mapped for name, tensor in file.tensors.items()}
    missing = set(stored)
    for leaf_path, leaf in leaves:
        _write(leaf_path, leaf, stored[leaf_path], tensors)
        missing.discard(leaf_path)
        del leaf  # else it would stay in memory while the next one is read
    if missing:
        raise ShapeError(f"cannot export to {folder}: there are no values of {', '.join(sorted(missing))}")
    for file in mapped:
        file.sync()
    if len(files) > 1:
        file_of_tensor = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of_tensor})
    if model.hf_generation_json is not None:
        write_json(folder / "generation_config.json", json.loads(model.hf_generation_json))
    dtype = str(dtypes[next(iter(shapes))]).removeprefix("torch.")
    dtype_key = next((key for key in ("dtype", "torch_dtype") if key in model.hf_config), "torch_dtype")
    written_keys = {"architectures": [model.hf_class], dtype_key: dtype, **model.hf_keys}
    kept = {key: value for key, value in model.hf_config.items() if key != QUANTISATION}
    write_json(folder / "config.json", {**kept, **written_keys})


def compare_hf(model: Model, leaves: Leaves, path: str | os.PathLike[str]) -> None:
    """Read the weights in the folder as `from_hf` does, and raise CheckpointError unless each has the bits of its leaf, rounded
    to the stored dtype. A finite value that is not finite after rounding is an error, too.
    """
    stored = stored_leaves(model)
    with HfReader(model, path) as reader:
        for leaf_path, leaf in leaves:
            for cut in _slabs(leaf, stored[leaf_path]):
                _compare(f"{leaf_path} in {path}", reader.read_leaf(leaf_path, cut), leaf[cut])
            del leaf  # else it would stay in memory while the next one is read


def _compare(place: str, read: Tensor, trained: Tensor) -> None:
    if not torch.equal(_bits(read), _bits(trained.to(read.dtype))):
        raise CheckpointError(f"the export is wrong: {place} does not have the values that were trained")
    if not read.isfinite().all() and trained.isfinite().all():
        raise CheckpointError(f"cannot export: {read.dtype} cannot hold all values of {place}. Choose another dtype.")


def _slabs(leaf: Tensor, stored: StoredLeaf) -> Iterable[tuple[slice, ...]]:
    """Parts that are small and together are the leaf without its padding."""
    shape, dim = stored.unpadded_shape, stored.slow_dim
    if dim is None or leaf.numel() == 0:
        return [tuple(slice(0, size) for size in shape)]
    rows = max(1, _SLAB_BYTES * leaf.shape[dim] // leaf.nbytes)
    return [
        tuple(slice(start, min(start + rows, size)) if i == dim else slice(0, size) for i, size in enumerate(shape))
        for start in range(0, shape[dim], rows)
    ]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _write(path: str, leaf: Tensor, stored: StoredLeaf, tensors: Mapping[str, Tensor]) -> None:
    if tuple(leaf.shape) != stored.shape:
        raise ShapeError(
            f"cannot write {path} as {stored.names[0]}: its shape is {tuple(leaf.shape)}, the model's is {stored.shape}; "
            "gather shards first"
        )
    stored.write(leaf, tensors)


def _split(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """For each file name the names of its tensors, in order; a tensor larger than `max_bytes` has a file of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
