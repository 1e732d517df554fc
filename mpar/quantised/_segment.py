"""QuantisedSegment: the function of a segment whose weights are quantised. The function itself knows nothing of that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import tree
from mpar.ops import StandIn
from mpar.quantised._layout import Layout, Parts

__all__ = ["QuantisedSegment", "QuantisedWeight"]


@dataclass(frozen=True, eq=False)
class QuantisedWeight(StandIn):
    """Stands for the weight of which it holds the parts. It is dequantised where it is used, each time anew.

    So no more than one dequantised weight needs to be there at a time, and a backward dequantises again.
    """

    parts: Parts
    layout: Layout
    compute_dtype: torch.dtype

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        """A tensor without data of its shape and dtype."""
        return torch.empty(self.layout.shape, dtype=self.compute_dtype, device="meta")

    def tensor(self) -> Tensor:
        """The dequantised weight."""
        return self.layout.dequantise(self.parts, self.compute_dtype)


@dataclass(frozen=True)
class QuantisedSegment:
    """`fn`, a function of a segment, for parameters some of which are quantised.

    weights: for each of these the index of its subtree among the parameters, its path in this, and its layout.

    Weights are used in the dtype of x; in a segment without x, in that of its first floating parameter.
    """

    fn: Callable[..., tuple]
    weights: tuple[tuple[int, str, Layout], ...]

    def __call__(self, params: tuple, x: object, context: Mapping[str, Tensor], *more: object, training: bool) -> tuple:
        """Call the function with stand-ins in the place of quantised weights."""
        dtypes = (leaf.dtype for leaf in tree.leaves((x, params)) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        dtype = next(dtypes, torch.get_default_dtype())
        made = list(params)
        for index, inside, layout in self.weights:
            weight = QuantisedWeight(tree.get(params[index], inside), layout, dtype)
            made[index] = tree.replace(made[index], inside, weight)
        return self.fn(tuple(made), x, context, *more, training=training)
