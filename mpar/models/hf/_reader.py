"""Reading any slice of any leaf from sharded safetensors."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpar.errors import CheckpointError, ShapeError
from mpar.models._model import Model
from mpar.models.hf._folder import locate
from mpar.models.hf._stored import absent, stored_leaves, with_base

__all__ = ["HfReader"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HfReader:
    """The weights of `model` in `folder`. Opening it reads headers only and compares every name, shape and dtype.

    Raises CheckpointError that lists all missing, unexpected and mis-shaped tensors. Use it in a `with` statement.
    """

    def __init__(self, model: Model, folder: str | os.PathLike[str]) -> None:
        self.model, self.folder = model, Path(folder)
        self._files: dict[str, Any] = {}
        self._where, self._base_less = with_base(locate(self.folder), model)
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
        carries_nothing = absent(self.model)
        others = [name for name in self._where if name not in expected]
        problems += [f"unexpected: {name}" for name in others if not carries_nothing.fullmatch(name)]
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
