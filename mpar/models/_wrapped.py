"""WrappedModel: a model that is made of another one, and is like it in all that a subclass does not change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from mpar.chain import Axes, Segment, Update
from mpar.models._matrix import Matrix
from mpar.models._model import Multiplications, Read, Trainable
from mpar.tree import Tree

__all__ = ["WrappedModel"]


class WrappedModel(Trainable):
    """Every member is that of `base`, unless a subclass has one of its own."""

    base: Trainable

    @property
    def segments(self) -> tuple[Segment, ...]:
        """As `base`."""
        return self.base.segments

    @property
    def abstract_params(self) -> Tree:
        """As `base`."""
        return self.base.abstract_params

    @property
    def param_axes(self) -> Tree:
        """As `base`."""
        return self.base.param_axes

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """As `base`."""
        return self.base.batch_axes

    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> Mapping[str, Tensor]:
        """As `base`."""
        return self.base.context(batch, row_length)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """As `base`."""
        return self.base.weight(batch)

    @property
    def updates(self) -> Mapping[str, Update]:
        """As `base`."""
        return self.base.updates

    @property
    def frozen(self) -> frozenset[str]:
        """As `base`."""
        return self.base.frozen

    @property
    def stands_for(self) -> Mapping[str, int]:
        """As `base`."""
        return self.base.stands_for

    @property
    def vocab_size(self) -> int:
        """As `base`."""
        return self.base.vocab_size

    @property
    def name(self) -> str:
        """As `base`."""
        return self.base.name

    @property
    def settings(self) -> object:
        """As `base`."""
        return self.base.settings

    @property
    def multiplications(self) -> Multiplications:
        """As `base`."""
        return self.base.multiplications

    @property
    def beside(self) -> Trainable | None:
        """As `base`."""
        return self.base.beside

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """As `base`."""
        return self.base.matrices

    @property
    def not_only_multiplied(self) -> frozenset[str]:
        """As `base`."""
        return self.base.not_only_multiplied

    @property
    def sequential(self) -> bool:
        """As `base`."""
        return self.base.sequential

    @property
    def max_positions(self) -> int | None:
        """As `base`."""
        return self.base.max_positions

    @property
    def next_keys(self) -> tuple[str, ...]:
        """As `base`."""
        return self.base.next_keys

    @property
    def hf_config(self) -> dict[str, object] | None:
        """As `base`."""
        return self.base.hf_config

    @property
    def plain(self) -> Trainable:
        """As `base`."""
        return self.base.plain

    def over(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """As `base`."""
        return self.base.over(segments)

    def plain_params(self, params: Tree, adapter: int = 0) -> Tree:
        """As `base`."""
        return self.base.plain_params(params, adapter)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """As `base`."""
        return self.base.adapter_names

    def gates(self, adapters: Tensor, of_last: Tensor) -> Mapping[str, Tensor]:
        """As `base`."""
        return self.base.gates(adapters, of_last)

    def without_multi_token(self) -> Trainable:
        """The same model of `base` without the layer that learns further tokens."""
        base = self.base.without_multi_token()
        return self if base is self.base else replace(self, base=base)  # type: ignore[type-var]  # every subclass is a dataclass

    def first_leaf(self, seed: int, path: str, slices: Sequence[slice] | None, read: Read) -> Tensor:
        """As `base`."""
        return self.base.first_leaf(seed, path, slices, read)

    @property
    def forbids_microbatches(self) -> str | None:
        """As `base`."""
        return self.base.forbids_microbatches

    @property
    def forbids_slices(self) -> str | None:
        """As `base`."""
        return self.base.forbids_slices

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """As `base`."""
        return self.base.init_leaf(seed, path, slices)
