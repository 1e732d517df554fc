"""Reading any slice of any leaf from sharded safetensors."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mpar.errors import CheckpointError, ShapeError
from mpar.models._model import Model
from mpar.models.hf._folder import DTYPES, locate, open_weights
from mpar.models.hf._stored import absent, stored_leaves, with_base

__all__ = ["HfReader"]



class HfReader:
    """The weights of `model` in `folder`. Making it reads headers only, and checks every name, shape and dtype.

    Raises CheckpointError, which lists all tensors that are missing, unexpected or of a wrong shape or dtype. Use it in a `with`
    statement.
    """

    def __init__(self, model: Model, folder: str | os.PathLike[str]) -> None:
        self.model, self.folder = model, Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of_tensor, self._name_in_file = with_base(locate(self.folder), model)
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
        """The dtype of the stored tensors; if they differ, the dtype to which torch promotes them all."""
        dtypes = sorted(set(self._dtypes.values()), key=str)
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each stored tensor that the model needs, by its name."""
        return dict(self._dtypes)

    def read_leaf(self, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The leaf at `path`, or its elements within `slices` (one per dim, without a step); only their bytes are read.

        Padding rows are zero. The dtype is that of the stored tensor.
        """
        leaf = self._leaves[path]
        shape = leaf.shape
        cuts = [slice(None)] * len(shape) if slices is None else slices
        if len(cuts) != len(shape) or any(cut.step not in (None, 1) for cut in cuts):
            raise ShapeError(f"cannot read {path} {shape} by {tuple(cuts)}: give one slice without a step for each dim")
        bounds = [cut.indices(size)[:2] for size, cut in zip(shape, cuts, strict=True)]
        return leaf.read(lambda name, block: self._slice(name)[block], [(start, max(start, stop)) for start, stop in bounds])

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of_tensor[name]).get_slice(self._name_in_file.get(name, name))

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_weights(self.folder / file)
        return self._files[file]

    def _compare(self) -> tuple[list[str], dict[str, torch.dtype]]:
        """`(problems, dtypes)`: in what the stored tensors differ from those of the model, and the dtype of each by name."""
        expected = {name: leaf.stored_shape for leaf in self._leaves.values() for name in leaf.names}
        further = {name for path, leaf in self._leaves.items() if path.startswith("mtp.") for name in leaf.names}
        none_of_further = further and further.isdisjoint(self._file_of_tensor)
        problems = [
            f"missing: {name} {shape}"
            for name, shape in expected.items()
            if name not in self._file_of_tensor and not (none_of_further and name in further)
        ]
        if none_of_further:
            layer = min(further).partition(".layers.")[2].partition(".")[0]
            layer = f"{self.model.base}layers.{layer}"
            problems.append(f"missing: all of {layer}, the layer for further tokens; without mtp_loss_weight it is not needed")
        not_needed = absent(self.model)
        others = [name for name in self._file_of_tensor if name not in expected]
        problems += [f"unexpected: {name}" for name in others if not not_needed.fullmatch(name)]
        dtypes = {}
        names_in_file: dict[str, frozenset[str]] = {}
        for name, shape in expected.items():
            if name not in self._file_of_tensor:
                continue
            file = self._file_of_tensor[name]
            if file not in names_in_file:
                names_in_file[file] = frozenset(self._open(file).keys())
            if self._name_in_file.get(name, name) not in names_in_file[file]:
                problems.append(f"missing: {name} is not in {file}, where the index says it is")
                continue
            stored = self._slice(name)
            if tuple(stored.get_shape()) != shape:
                problems.append(f"shape: {name} is {tuple(stored.get_shape())}, the config asks for {shape}")
            if stored.get_dtype() not in DTYPES:
                problems.append(f"dtype: {name} is {stored.get_dtype()}; only {', '.join(DTYPES)} are implemented")
            else:
                dtypes[name] = DTYPES[stored.get_dtype()]
        return problems, dtypes
