"""The segment of one layer: its norms and parts, and what they add to the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpar import ops
from mpar.models.decoder._config import LayerConfig
from mpar.models.decoder._params import Block, norm_leaves, part_params
from mpar.models.decoder._places import BLOCK, RESIDUAL
from mpar.models.layers import Cache, CacheSizes, Carried, PartConfig, PartParams, State, apply_part, drop, normalise, part_of

__all__ = ["BlockSegment"]

Apply = Callable[[PartParams[Tensor], PartConfig, Tensor], Tensor]
"""`fn(parameters, config, normed x)` gives what a part adds to the residual stream."""
Added = Callable[[Tensor, str], Tensor]
"""`fn(y, label)`: what is added to the residual stream of what the part with this label computed."""


@dataclass(frozen=True)
class BlockSegment:
    """One layer. Segments of equal layers are equal, so that the compiler makes one kind for them."""

    layer: LayerConfig

    def __call__(self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], *, training: bool) -> tuple:
        """(B, S, D) to `((B, S, D), losses)`, or `((B, S, D), losses, metrics)` if a part has metrics."""
        x, _, *losses_and_metrics = self.slice(params, x, context, (), training=training)
        return x, *losses_and_metrics

    def slice(
        self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], past: tuple, *, training: bool
    ) -> tuple:
        """`__call__` for a slice of rows, see `Carry.fn`; what is carried to later slices is the second result."""
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        carried: Carried | None = None

        def apply(parameters: PartParams[Tensor], config: PartConfig, normed: Tensor) -> Tensor:
            nonlocal carried
            part = part_of(config)
            if part.slice is not None:
                y, carried = part.slice(parameters, config, normed, context, past)
                return y
            y, part_losses, part_metrics = apply_part(parameters, config, normed, context, training=training)
            losses.update(part_losses)
            metrics.update(part_metrics)
            return y

        def added(y: Tensor, label: str) -> Tensor:
            return drop(y, self.layer.dropout if training else 0.0, context, label)

        x = self._residual(params[0], x, apply, added)
        return (x, carried, losses, metrics) if metrics else (x, carried, losses)

    def decode(
        self, params: tuple[Block[Tensor]], x: Tensor, context: Mapping[str, Tensor], state: State | None
    ) -> tuple[Tensor, State | None]:
        """(B, S, D) of tokens that follow those of `state` (None: they are the first) to (B, S, D) and the state after them."""
        state_after = state

        def apply(parameters: PartParams[Tensor], config: PartConfig, normed: Tensor) -> Tensor:
            nonlocal state_after
            part = part_of(config)
            if part.decode is None:
                return apply_part(parameters, config, normed, context, training=False)[0]
            y, state_after = part.decode(parameters, config, normed, context, state_after)
            return y

        x = self._residual(params[0], x, apply)
        return x, state_after

    def cached(
        self,
        params: tuple[Block[Tensor]],
        x: Tensor,
        context: Mapping[str, Tensor],
        state: tuple[Cache[Tensor]],
        sizes: CacheSizes,
        *,
        training: bool,
    ) -> tuple[Tensor, tuple[Cache[Tensor]], dict[str, Tensor]]:
        """`__call__` for tokens of several rows, each after those that the layer's cache, `state`, holds; with the new cache."""
        (cache,) = state

        def apply(parameters: PartParams[Tensor], config: PartConfig, normed: Tensor) -> Tensor:
            nonlocal cache
            part = part_of(config)
            if part.cached is None:
                return apply_part(parameters, config, normed, context, training=training)[0]
            y, cache = part.cached(parameters, config, normed, context, cache, sizes)
            return y

        return self._residual(params[0], x, apply), (cache,), {}

    def _residual(self, block: Block[Tensor], x: Tensor, apply: Apply, added: Added = lambda y, _: y) -> Tensor:
        """`x` plus what the parts of the layer add to it; `apply` computes one part, `added` is what becomes of its result."""
        layer = self.layer
        for label, config in zip(("attn", "mlp"), layer.parts, strict=False):
            gain_D, bias_D = norm_leaves(block, label)
            normed = x if gain_D is None else normalise(layer.norm, x, gain_D, bias_D, f"{label}_norm")
            normed = ops.constrain(normed, BLOCK)
            y = apply(part_params(block, config), config, normed)
            gain_D, bias_D = norm_leaves(block, f"{label}_post")
            if gain_D is not None:
                y = ops.constrain(normalise(layer.norm, y, gain_D, bias_D, f"{label}_post_norm"), RESIDUAL)
            x = x + added(y, label)
        return x
