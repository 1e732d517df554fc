"""The last segment: final norm, output matrix, cross-entropy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.models.decoder._config import DecoderConfig
from mpar.models.decoder._places import BLOCK
from mpar.models.layers import NormConfig, normalise

__all__ = ["HeadSegment", "ScreenedHeadSegment", "all_have_logits", "head_segment"]

_TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class HeadSegment:
    """The function of the last segment; for the fields see `DecoderConfig`."""

    norm: NormConfig
    vocab_size: int
    logits_chunk: int | None
    soft_cap: float | None = None
    only_logits: ClassVar[tuple[str, ...]] = ("head_DV",)

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[None, dict[str, Tensor]]:
        """(B, S, D) to the sum of the losses of its tokens."""
        labels_BS, weights_BS = context["labels"], context.get("token_weights")
        if self.logits_chunk is None:
            loss, _ = ops.cross_entropy(self.logits(params, x), labels_BS, token_weights=weights_BS, vocab_size=self.vocab_size)
        else:
            loss, _ = ops.linear_cross_entropy(
                self._normed(params, x),
                _matrix_DV(params),
                labels_BS,
                token_weights=weights_BS,
                vocab_size=self.vocab_size,
                chunk=self.logits_chunk,
            )
        return None, {"loss": loss}

    def token_losses(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to the losses (B, S) of its tokens, in nats; 0 where the label is -100."""
        labels_BS = context["labels"]
        if self.logits_chunk is None:
            return ops.token_losses(self.logits(params, x), labels_BS, vocab_size=self.vocab_size)
        normed, chunk = self._normed(params, x), self.logits_chunk
        return ops.linear_token_losses(normed, _matrix_DV(params), labels_BS, vocab_size=self.vocab_size, chunk=chunk)

    def token_logits(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to logits (B, S, V), where V may be padded beyond `vocab_size`."""
        return self.logits(params, x)

    def hidden(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """(B, S, D) to what is multiplied with the output matrix, (B, S, D)."""
        return self._normed(params, x)

    def factors(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """(B, S, D) to features (B, S, D) and the output matrix (D, V); None if logits have a soft cap."""
        return None if self.soft_cap is not None else (self._normed(params, x), _matrix_DV(params))

    @property
    def tokens_at_once(self) -> int:
        """`logits_chunk`, or 1,024."""
        return self.logits_chunk or _TOKENS_AT_ONCE

    def last_logits(
        self,
        params: tuple,
        x: Tensor,
        context: Mapping[str, Tensor],
        *,
        training: bool,
        product: Callable[[tuple, Tensor], Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(B, T, D) to the logits (B, R, vocab_size) of the tokens at the places `last` (B, R); where it is -1, of the first.
        product: see `logits`."""
        index_BR, axes = context["last"].clamp(min=0), ("batch", None, "embed")
        if all_have_logits(x, index_BR):
            logits_BTV = ops.constrain(self.logits(params, x, axes, product), ("batch", None, None))
            logits_BRV = logits_BTV[0].index_select(0, index_BR[0])[None]
        else:
            chosen_BRD = x.gather(1, index_BR[..., None].expand(-1, -1, x.shape[2]))
            logits_BRV = ops.constrain(self.logits(params, chosen_BRD, axes, product), ("batch", None, None))
        return {"logits": logits_BRV[..., : self.vocab_size]}, {}

    def logits(
        self, params: tuple, x: Tensor, axes: Axes = BLOCK, product: Callable[[tuple, Tensor], Tensor] | None = None
    ) -> Tensor:
        """(B, S, D) to logits over the padded vocabulary; `axes` are those of the normed x. product: `fn(params, normed)` is
        the product of this with the output matrix; None: all of it."""
        normed = self._normed(params, x, axes)
        if product is not None:
            logits_BSV = product(params, normed)
        elif params[0].head_DV is None:
            logits_BSV = ops.einsum("bsd,vd->bsv", normed, params[1].table_VD)
        else:
            logits_BSV = ops.einsum("bsd,dv->bsv", normed, params[0].head_DV)
        if self.soft_cap is not None:
            logits_BSV = (logits_BSV / self.soft_cap).tanh() * self.soft_cap
        return ops.name(logits_BSV, "logits")

    def _normed(self, params: tuple, x: Tensor, axes: Axes = BLOCK) -> Tensor:
        return ops.constrain(normalise(self.norm, x, params[0].norm_D, params[0].norm_bias_D, "final_norm"), axes)


@dataclass(frozen=True)
class ScreenedHeadSegment:
    """The logits of `HeadSegment.last_logits`, where the context says which rows are `greedy`; the last of the parameters is the
    screen of the output matrix, see `mpar.ops.largest_logits`. Without a soft cap, by which different logits may become equal."""

    head: HeadSegment

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `HeadSegment.last_logits`."""
        *own, screen = params

        def product(params: tuple, normed: Tensor) -> Tensor:
            return ops.largest_logits(normed, _matrix_DV(params).transpose(0, 1), screen, context["greedy"])

        return self.head.last_logits(tuple(own), x, context, training=training, product=product)


def _matrix_DV(params: tuple) -> Tensor:
    return params[1].table_VD.transpose(0, 1) if params[0].head_DV is None else params[0].head_DV


def all_have_logits(tokens_BT: Tensor, last_BR: Tensor) -> bool:
    """Whether `last_logits` computes the logits of every token: of one group of rows, if it has fewer tokens than rows."""
    return tokens_BT.shape[0] == 1 and tokens_BT.shape[1] < last_BR.shape[1]


def head_segment(config: DecoderConfig) -> HeadSegment:
    """The function of the last segment of the chain; it can also give logits instead of the loss."""
    return HeadSegment(config.norm, config.vocab_size, config.logits_chunk, config.logits_soft_cap)
