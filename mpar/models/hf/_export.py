"""Writing a folder that transformers can load."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mpar import tree
from mpar.errors import CheckpointError, ShapeError
from mpar.models._model import Model
from mpar.models.decoder import DecoderParams
from mpar.models.hf._folder import INDEX, SINGLE, write_json
from mpar.models.hf._stored import stored_leaves

__all__ = ["hf_tensors", "to_hf"]

MAX_FILE_BYTES = 5 * 10**9


def hf_tensors(model: Model, params: DecoderParams[Tensor]) -> dict[str, Tensor]:
    """`params` under their Hugging Face names, without padding; it may be any tree of the same shapes, such as gradients.

    A tied embedding appears once, under the embedding's name. Raises ShapeError if a leaf does not have its global shape.
    """
    tensors: dict[str, Tensor] = {}
    for path, stored in stored_leaves(model).items():
        leaf = tree.get(params, path)
        if tuple(leaf.shape) != stored.shape:
            raise ShapeError(
                f"cannot write {path} as {stored.names[0]}: its shape is {tuple(leaf.shape)}, the model's is {stored.shape}; "
                "gather shards first"
            )
        stored.write(leaf, tensors)
    return tensors


def to_hf(
    model: Model, params: DecoderParams[Tensor], path: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a folder that transformers can load.

    It has the weights in files of at most `max_file_bytes`, an index if there are several files, a config.json with all keys of
    the original one, and generation_config.json if the model came with one. If the architecture has layers for further tokens,
    config.json says how many of them are in the folder.

    Raises CheckpointError if the folder already has weights, because old files could be loaded together with the new ones.
    """
    folder = Path(path)
    old = sorted(file.name for file in folder.glob("*.safetensors*")) if folder.is_dir() else []
    if old:
        raise CheckpointError(
            f"cannot export to {folder}: it already holds weights ({', '.join(old[:3])}); choose another folder"
        )
    tensors = hf_tensors(model, params)
    folder.mkdir(parents=True, exist_ok=True)
    files = _split(tensors, max_file_bytes)
    for file, names in files.items():
        save_file({name: tensors[name].detach().cpu() for name in names}, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        file_of_tensor = {name: file for file, names in files.items() for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of_tensor})
    if model.hf_generation_json is not None:
        write_json(folder / "generation_config.json", json.loads(model.hf_generation_json))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    dtype_key = next((key for key in ("dtype", "torch_dtype") if key in model.hf_config), "torch_dtype")
    written_keys = {"architectures": [model.architecture.hf_class], dtype_key: dtype, **_layers_behind(model)}
    write_json(folder / "config.json", {**model.hf_config, **written_keys})


def _layers_behind(model: Model) -> dict[str, int]:
    """The entry of config.json for the number of layers for further tokens; readers take it to be 1 if it is missing."""
    key = model.architecture.layers_behind
    return {} if key is None else {key: 0 if model.config.multi_token is None else 1}


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, list[str]]:
    """For each file name the names of its tensors, in order; a tensor larger than `max_bytes` has a file of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if groups[-1] and used + tensor.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
