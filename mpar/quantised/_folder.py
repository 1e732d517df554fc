"""Folders of quantised weights as transformers and bitsandbytes write them, read and written.

A matrix of nf4 is `NAME.weight` with its codes, and `NAME.weight.absmax`, `.nested_absmax`, `.quant_map`, `.nested_quant_map` and
`.quant_state.bitsandbytes__nf4`, which is JSON in bytes. One of int8 is `NAME.weight` and `NAME.SCB`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from mpar import tree
from mpar.errors import CheckpointError, ConfigError
from mpar.models import QUANTISATION, Model, StoredLeaf, Trainable, locate, open_weights, read_json, stored_leaves
from mpar.ops import NF4_BLOCK, NF4_CODES, Int8, Nf4, nf4_scale_codes
from mpar.quantised._layout import Kind, Layout, Parts
from mpar.quantised._model import PartsSource, QuantisedModel, quantise
from mpar.tree import Tree

__all__ = ["QuantisedReader", "is_quantised_folder", "quantised_as", "write_quantised"]

_STATE = ".quant_state.bitsandbytes__nf4"
_NESTED_BLOCK = 256


def is_quantised_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether the config.json of a folder says that its weights are quantised by bitsandbytes."""
    config = read_json(Path(folder) / "config.json").get(QUANTISATION)
    return isinstance(config, dict) and config.get("quant_method", "bitsandbytes") == "bitsandbytes"


def quantised_as(model: Trainable, folder: str | os.PathLike[str]) -> QuantisedModel:
    """`model` with those weights quantised that are so in a folder of bitsandbytes. Its adapters are added before.

    Raises ConfigError for a folder without quantised weights of the model, or with both kinds.
    """
    plain = _plain_model(model)
    stored, present = stored_leaves(plain), locate(Path(folder))
    suffixes: dict[Kind, Callable[[str], str]] = {"nf4": lambda name: name + _STATE, "int8": _scale_name}
    of_kind = {
        kind: {path for path, leaf in stored.items() if any(suffix(name) in present for name in leaf.names)}
        for kind, suffix in suffixes.items()
    }
    kinds = [kind for kind, paths in of_kind.items() if paths]
    if len(kinds) != 1:
        raise ConfigError(f"cannot read quantised weights of this {model.name} model in {folder}: it has {kinds or 'none'}.")
    found = of_kind[kinds[0]]
    exclude = [matrix.name for matrix in model.matrices if not any(leaf.path in found for leaf in matrix.leaves)]
    return quantise(model, kinds[0], exclude=exclude)


class QuantisedReader(PartsSource):
    """The weights of a quantised model in a folder of bitsandbytes. Making it reads headers only, and checks names.

    Raises CheckpointError, which lists all tensors that are missing, and matrices that are quantised in the folder but not in the
    model, or the other way round. Use it in a `with` statement.
    """

    def __init__(self, model: QuantisedModel, folder: str | os.PathLike[str]) -> None:
        self.model, self.folder = model, Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of_tensor = locate(self.folder)
        self._leaves = stored_leaves(_plain_model(model))
        problems = [*self._problems()]
        if problems:
            lines = "\n  ".join(problems[:20])
            raise CheckpointError(
                f"the weights in {self.folder} are not those of this {model.name} model in {model.kind}:\n  {lines}\n"
                "Choose which matrices are quantised by targets and exclude."
            )

    def __enter__(self) -> "QuantisedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def part(self, path: str, slices: Sequence[slice] | None) -> Tensor:
        """The elements within `slices` (None: all) of a part of a quantised weight."""
        root, _, part = path.rpartition(".")
        made: Tensor = getattr(self._parts(root, self.model.layouts[root]), part)
        return made if slices is None else made[tuple(slices)].contiguous()

    def params(self, seed: int = 0) -> Tree:
        """All parameters."""
        like = self.model.abstract_params
        return tree.unflatten(tree.flatten(like)[1], [self.model.first_leaf(seed, path, None, self) for path in tree.paths(like)])

    def __call__(self, path: str, slices: Sequence[slice] | None) -> Tensor:
        """The elements within `slices` (None: all) of a leaf that is not quantised. Raises CheckpointError for one that is."""
        if path in self.model.layouts:
            raise CheckpointError(
                f"cannot begin with values that depend on the weight {path}: {self.folder} has only its codes.\n"
                "Use an adapter with init=kaiming or gaussian and without DoRA, or a folder with the weights."
            )
        leaf = self._leaves[path]
        cuts = [slice(None)] * len(leaf.shape) if slices is None else slices
        bounds = [cut.indices(size)[:2] for cut, size in zip(cuts, leaf.shape, strict=True)]
        return leaf.read(lambda name, block: self._slice(name)[block], bounds)

    def _parts(self, path: str, layout: Layout) -> Parts:
        parts = [self._part(name, layout) for name in self._leaves[path].names]
        first, *others = parts
        joined = first if layout.expert is None else tree.map_leaves(lambda *tensors: torch.stack(tensors), first, *others)
        return layout.spread(joined)

    def _part(self, name: str, layout: Layout) -> Parts:
        """The parts of one stored matrix."""
        *_, rows, columns = layout.matrix_shape
        codes = self._slice(name)[:]
        if layout.kind == "int8":
            return Int8(codes.reshape(rows, columns), self._slice(_scale_name(name))[:].float().view(torch.int32))
        state = json.loads(bytes(self._slice(name + _STATE)[:].tolist()))
        found = {key: state.get(key) for key in ("quant_type", "blocksize", "nested_blocksize", "shape")}
        wanted = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "nested_blocksize": _NESTED_BLOCK, "shape": [rows, columns]}
        if found != wanted:
            raise CheckpointError(f"cannot read {name} in {self.folder}: it is {found}, which must be {wanted}")
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
        return Nf4(
            codes.view(torch.uint8).reshape(rows, columns // 2),
            self._slice(f"{name}.absmax")[:].reshape(rows, columns // NF4_BLOCK),
            self._slice(f"{name}.nested_absmax")[:].view(torch.int32),
            offset.view(torch.int32),
        )

    def _problems(self) -> Iterator[str]:
        suffixes = ["", _STATE, ".absmax", ".nested_absmax"] if self.model.kind == "nf4" else [""]
        for path, leaf in self._leaves.items():
            quantised = path in self.model.layouts
            if quantised and leaf.transform.is_part:
                yield f"{path} is a part of {leaf.names[0]}, whose codes share magnitudes with its other parts; exclude it"
            for name in leaf.names:
                needed = [name + suffix for suffix in suffixes] if quantised else [name]
                needed += [_scale_name(name)] * (quantised and self.model.kind == "int8")
                yield from (f"missing: {item}" for item in needed if item not in self._file_of_tensor)
                if not quantised and {name + _STATE, _scale_name(name)} & set(self._file_of_tensor):
                    yield f"quantised in the folder only: {name}"

    def _slice(self, name: str) -> Any:
        file = self._file_of_tensor[name]
        if file not in self._files:
            self._files[file] = open_weights(self.folder / file)
        return self._files[file].get_slice(name)


def write_quantised(model: QuantisedModel, params: Tree, folder: str | os.PathLike[str]) -> None:
    """Write a folder that transformers loads with bitsandbytes: the weights in one file, and config.json.

    Adapters are not written. Raises CheckpointError if the folder already has weights, and ConfigError for a leaf that is a part
    of a stored matrix, which has magnitudes of its own.
    """
    plain, path = _plain_model(model), Path(folder)
    if path.is_dir() and any(path.glob("*.safetensors*")):
        raise CheckpointError(f"cannot export to {path}: it already holds weights; choose another folder")
    tensors: dict[str, Tensor] = {}
    for leaf_path, stored in stored_leaves(plain).items():
        if leaf_path in model.layouts:
            tensors |= _stored_parts(stored, model.layouts[leaf_path], tree.get(params, leaf_path))
            continue
        leaf = tree.get(params, leaf_path)
        for name in stored.names:
            tensors.setdefault(name, leaf.new_empty(stored.stored_shape))
        stored.write(leaf, tensors)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {**plain.hf_config, "architectures": [plain.hf_class], **plain.hf_keys, QUANTISATION: _config_of(model)}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stored_parts(stored: StoredLeaf, layout: Layout, parts: Parts) -> Mapping[str, Tensor]:
    """The tensors of one leaf by name."""
    if stored.transform.is_part:
        raise ConfigError(f"cannot write {stored.names[0]} quantised: its parts were quantised one by one; exclude it")
    flat = layout.flattened(parts)
    tensors: dict[str, Tensor] = {}
    for index, name in enumerate(stored.names):
        one = flat if layout.expert is None else tree.map_leaves(lambda part, index=index: part[index], flat)
        if isinstance(one, Int8):
            tensors |= {name: one.codes.contiguous(), _scale_name(name): one.absmax.view(torch.float32)}
            continue
        *_, rows, columns = layout.matrix_shape
        state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": [rows, columns]}
        state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32"}
        state |= {"nested_offset": one.offset.view(torch.float32).item()}
        tensors |= {
            name: one.codes.reshape(-1, 1).contiguous(),
            f"{name}.absmax": one.absmax.flatten().contiguous(),
            f"{name}.nested_absmax": one.nested.view(torch.float32),
            f"{name}.quant_map": torch.tensor(NF4_CODES),
            f"{name}.nested_quant_map": torch.tensor(nf4_scale_codes()),
            name + _STATE: torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8),
        }
    return tensors


def _config_of(model: QuantisedModel) -> dict[str, object]:
    """The quantization_config that transformers reads: matrices that are not quantised are named in it."""
    quantised = {name for path in model.layouts for name in stored_leaves(_plain_model(model))[path].names}
    others = [matrix.name for matrix in model.matrices if f"{matrix.name}.weight" not in quantised]
    four = model.kind == "nf4"
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"}
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "llm_int8_skip_modules": sorted({name for name in others if "embed" not in name}),
        **(nf4 | {"bnb_4bit_compute_dtype": "bfloat16"} if four else {"llm_int8_threshold": 0.0}),
    }


def _scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.SCB"


def _plain_model(model: Trainable) -> Model:
    plain = model.plain
    if not hasattr(plain, "stored_names"):
        raise ConfigError(f"{plain.name} does not say how its parameters are called in folders of Hugging Face")
    return cast(Model, plain)
