"""LanguageHead: what the function of the last segment of a language model can give besides its loss."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["HiddenHead", "LanguageHead", "LinearHead"]


@runtime_checkable
class LanguageHead(Protocol):
    """`params` and `x` are those of the segment, `context` has tokens and labels."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without padding."""

    def token_losses(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Minus the log-probability of each label, (B, S), in nats; 0 where the label is -100."""

    def token_logits(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, S, V), where V may be padded beyond the vocabulary."""


@runtime_checkable
class LinearHead(LanguageHead, Protocol):
    """A head that can also give the two factors of its logits, so that a loss need not make all of them at a time."""

    def factors(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Features (B, S, D) and a matrix (D, V) whose product the logits are; None if they are more than a product."""

    @property
    def tokens_at_once(self) -> int:
        """For how many tokens logits shall exist at a time."""


@runtime_checkable
class HiddenHead(LanguageHead, Protocol):
    """A head that can also give what it multiplies with the output matrix. only_logits: the leaves below the first path of its
    segment that only logits need."""

    only_logits: tuple[str, ...]

    def hidden(self, params: tuple, x: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """The features (B, S, D) of each token."""
