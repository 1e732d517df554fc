"""Reading: what attention and experts of a traced layer know besides their operands while the layer runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from mpar.errors import ConfigError
from mpar.tree import Leaf, struct

__all__ = ["Keys", "Reading", "current", "reading", "running"]


@struct
class Keys(Generic[Leaf]):
    """The keys and values of one call of attention; order_M: their positions, while tokens are generated."""

    k_BMKH: Leaf
    v_BMKH: Leaf
    order_M: Leaf | None = None


@dataclass
class Reading:
    """One run of a layer.

    context: as segments read it. rows, length: the sizes of x.
    past:    what earlier slices of the same rows carried: for each of them, for each call of attention in the layer, its keys.
    state:   while tokens are generated: for each call of attention the keys so far. None: tokens are not generated.
    carried: filled by the run: the keys of each call of attention, for later slices or tokens.
    behind:  filled by the run: how many items the layer returns behind x; None if it returns x alone, in no tuple.
    """

    context: Mapping[str, Tensor]
    rows: int
    length: int
    past: Sequence[Sequence[Keys[Tensor]]] = ()
    state: Sequence[Keys[Tensor]] | None = None
    carried: list[Keys[Tensor]] = field(default_factory=list)
    behind: int | None = None


_current: ContextVar[Reading | None] = ContextVar("mpar_reading", default=None)


def running() -> Reading | None:
    """What the layer that runs now may read; None outside of layers."""
    return _current.get()


def current(who: object) -> Reading:
    """What the layer that runs now may read. Raises ConfigError if `who` runs outside of a layer."""
    found = _current.get()
    if found is None:
        raise ConfigError(f"{type(who).__name__} runs before or behind the layers, where there is no attention and no expert")
    return found


@contextmanager
def reading(found: Reading) -> Iterator[None]:
    """While it is open, `current` gives `found`."""
    token = _current.set(found)
    try:
        yield
    finally:
        _current.reset(token)
