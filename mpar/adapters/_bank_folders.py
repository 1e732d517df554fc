"""BankReader: the adapters of a bank in folders of PEFT, side by side along the rank, as the tree of the bank has them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor

from mpar.adapters._bank import AdapterBank
from mpar.adapters._folder import AdapterReader

__all__ = ["BankReader"]


class BankReader:
    """The adapters of `bank` in `folders`, by their names. Making it reads headers only, and checks each as `AdapterReader` does.

    Raises CheckpointError for a folder whose adapter does not fit the base. Use it in a `with` statement.
    """

    def __init__(self, bank: AdapterBank, folders: Mapping[str, str | os.PathLike[str]]) -> None:
        self._bank, self._stack = bank, ExitStack()
        self._readers = {name: self._stack.enter_context(AdapterReader(model, folders[name])) for name, model in bank.alone}

    def __enter__(self) -> "BankReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves of all adapters."""
        return tuple(self._bank.leaves)

    def read_leaf(self, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The leaf at `path`, or its elements within `slices`, which leave the rank whole; only their bytes are read.

        Raises ConfigError for values that are not finite.
        """
        return self._bank.joined(path, lambda name, inside: self._readers[name].read_leaf(inside, slices))
