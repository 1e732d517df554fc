"""What generated code asks of the processes, or of a simulation of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from mpar.runtime.comm._shared_posts import Post

__all__ = ["ALONE", "Comm", "Posted"]


@dataclass(frozen=True)
class Posted:
    """Messages on their way: what they will fill, what has to be waited for, and what must stay as it is until then."""

    values: tuple[Tensor, ...]
    works: Sequence[dist.Work | Post]
    sent: Sequence[Tensor]


class Comm(Protocol):
    """What generated code asks for. Lists of tensors travel as one message; `dim` is then a list too."""

    def index(self, axes: tuple[str, ...]) -> int: ...
    def all_gather(
        self, x: Tensor | list[Tensor], *, axes: tuple[str, ...], dim: int | list[int], size: int
    ) -> Tensor | list[Tensor]: ...
    def reduce_scatter(
        self, x: Tensor | list[Tensor], *, axes: tuple[str, ...], dim: int | list[int], size: int
    ) -> Tensor | list[Tensor]: ...
    def all_reduce(self, x: Tensor | list[Tensor], *, axes: tuple[str, ...], op: str, size: int) -> Tensor | list[Tensor]: ...
    def all_to_all(self, x: Tensor, *, axes: tuple[str, ...], src: int, dst: int, size: int) -> Tensor: ...
    def shift(self, xs: list[Tensor], *, axes: tuple[str, ...], size: int) -> Posted: ...
    def exchange_rows(
        self, xs: list[Tensor], sent: Tensor, received: Tensor, *, axes: tuple[str, ...], size: int, num_rows: int | None
    ) -> Posted: ...
    def arrived(self, posted: Posted, sent: list[Tensor]) -> tuple[Tensor, ...]: ...
    def send(self, x: Tensor, *, peer: int, message: int, kind: str) -> None: ...
    def receive(self, buffer: Tensor, *, peer: int, message: int, kind: str) -> None: ...
    def wait(self, message: int) -> None: ...


class _Alone:
    """A mesh of one rank has nothing to say."""

    def index(self, axes: tuple[str, ...]) -> int:
        """The only position."""
        return 0


ALONE = cast(Comm, _Alone())  # code for one rank has no collectives to call
