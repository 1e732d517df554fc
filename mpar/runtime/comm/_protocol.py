"""The communication that generated code calls, between processes or in a simulation of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from mpar.runtime.comm._shared_posts import Post

__all__ = ["ALONE", "Comm", "Posted"]


Tensors = Tensor | list[Tensor]


@dataclass(frozen=True)
class Posted:
    """A posted collective.

    values: the results, which must not be read before `works` were waited for.
    sent:   the tensors that are sent, which must not change before.
    """

    values: Sequence[Tensor]
    works: Sequence[dist.Work | Post]
    sent: Sequence[Tensor]


class Comm(Protocol):
    """The communication of one rank. A list of tensors is one collective; `dim` is then a list too.

    With `posted=True` a collective only posts its messages and returns what `arrived` waits for.
    """

    def index(self, axes: tuple[str, ...]) -> int: ...
    def all_gather(
        self, x: Tensors, *, axes: tuple[str, ...], dim: int | list[int], size: int, posted: bool = False
    ) -> Tensors | Posted: ...
    def reduce_scatter(
        self, x: Tensors, *, axes: tuple[str, ...], dim: int | list[int], size: int, posted: bool = False
    ) -> Tensors | Posted: ...
    def all_reduce(
        self, x: Tensors, *, axes: tuple[str, ...], op: str, size: int, posted: bool = False
    ) -> Tensors | Posted: ...
    def all_to_all(
        self, x: Tensor, *, axes: tuple[str, ...], src: int, dst: int, size: int, posted: bool = False
    ) -> Tensor | Posted: ...
    def shift(self, xs: list[Tensor], *, axes: tuple[str, ...], size: int) -> Posted: ...
    def exchange_rows(
        self, xs: list[Tensor], sent: Tensor, received: Tensor, *, axes: tuple[str, ...], size: int, num_rows: int | None
    ) -> Posted: ...
    def arrived(self, posted: Posted, sent: list[Tensor]) -> tuple[Tensor, ...]: ...
    def send(self, x: Tensor, *, peer: int, message: int, kind: str) -> None: ...
    def receive(self, buffer: Tensor, *, peer: int, message: int, kind: str) -> None: ...
    def wait(self, message: int) -> None: ...


class _Alone:
    """The communication of a mesh of one rank, of which only `index` is called."""

    def index(self, axes: tuple[str, ...]) -> int:
        """The only index."""
        return 0


ALONE = cast(Comm, _Alone())  # code for one rank has no collectives to call
