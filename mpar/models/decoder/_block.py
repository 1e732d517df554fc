"""The segment of one layer: norms, its parts, the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpar import ops
from mpar.models.decoder._config import LayerConfig
from mpar.models.decoder._params import Block, norm_leaves, part_params
from mpar.models.decoder._places import BLOCK, RESIDUAL
from mpar.models.layers import Carried, PartConfig, PartParams, State, apply_part, normalise, part_of

__all__ = ["BlockSegment"]

Apply = Callable[[PartParams[Tensor], PartConfig, Tensor], Tensor]
"""`fn(parameters, config, normed x)` gives what a part adds to the residual stream."""


@dataclass(frozen=True)
class BlockSegment:
    """One layer; equal settings are one kind to the compiler."""

    layer: LayerConfig

    def __call__(self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], *, training: bool) -> tuple:
        """(B, S, D) to `((B, S, D), losses)`, or `((B, S, D), losses, metrics)` if a part has metrics."""
        x, _, *rest = self.slice(params, x, context, (), training=training)
        return x, *rest

    def slice(
        self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], past: tuple, *, training: bool
    ) -> tuple:
        """The same for slices of rows, see `Carry`: what is carried to later ones comes second."""
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        carried: Carried | None = None

        def apply(own: PartParams[Tensor], config: PartConfig, normed: Tensor) -> Tensor:
            nonlocal carried
            part = part_of(config)
            if part.slice is not None:
                y, carried = part.slice(own, config, normed, context, past)
                return y
            y, more_losses, more_metrics = apply_part(own, config, normed, context, training=training)
            losses.update(more_losses)
            metrics.update(more_metrics)
            return y

        x = self._residual(params[0], x, apply)
        return (x, carried, losses, metrics) if metrics else (x, carried, losses)

    def decode(
        self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], state: State | None
    ) -> tuple[Tensor, State | None]:
        """(B, S, D) of the tokens that follow those of `state` (None: the first of all) to (B, S, D) and the state after them."""
        carried = state

        def apply(own: PartParams[Tensor], config: PartConfig, normed: Tensor) -> Tensor:
            nonlocal carried
            part = part_of(config)
            if part.decode is None:
                return apply_part(own, config, normed, context, training=False)[0]
            y, carried = part.decode(own, config, normed, context, carried)
            return y

        x = self._residual(params[0], x, apply)
        return x, carried

    def _residual(self, block: Block[Tensor], x: Tensor, apply: Apply) -> Tensor:
        """`x` and what its parts add to it; `apply(parameters, config, normed x)` runs a part."""
        layer = self.layer
        for label, config in zip(("attn", "mlp"), layer.parts, strict=False):
            gain_D, bias_D = norm_leaves(block, label)
            normed = x if gain_D is None else normalise(layer.norm, x, gain_D, bias_D, f"{label}_norm")
            normed = ops.constrain(normed, BLOCK)
            y = apply(part_params(block, config), config, normed)
            gain_D, bias_D = norm_leaves(block, f"{label}_post")
            if gain_D is not None:
                y = ops.constrain(normalise(layer.norm, y, gain_D, bias_D, f"{label}_post_norm"), RESIDUAL)
            x = x + y
        return x
