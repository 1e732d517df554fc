"""The config of a decoder: its layers, final norm, rotations, vocabulary, and the layer for further tokens."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mpar.errors import ConfigError
from mpar.models.layers import (
    MambaConfig,
    Mixer,
    Mlp,
    MoeConfig,
    NormConfig,
    PartConfig,
    Rope,
    check_rate,
    depends_on_length,
    part_of,
)

__all__ = ["DecoderConfig", "LayerConfig", "MultiTokenConfig", "with_dropout", "with_mlp_chunk"]


@dataclass(frozen=True)
class LayerConfig:
    """One layer: its mixer of tokens, its feed-forward layer (None: it has none), and its norms.

    norms: where norms stand: "pre", x + f(norm(x)); "post", x + norm(f(x)) (OLMo 2, arXiv:2501.00656, section 3.2); or "both".
    dropout: with which probability training drops each feature of what a part adds to the residual stream.
    """

    mixer: Mixer
    mlp: Mlp | None
    norm: NormConfig = NormConfig()  # noqa: RUF009 (it is frozen)
    norms: Literal["pre", "post", "both"] = "pre"
    dropout: float = 0.0

    @property
    def parts(self) -> tuple[PartConfig, ...]:
        """The configs of its parts, in order."""
        return (self.mixer,) if self.mlp is None else (self.mixer, self.mlp)

    @property
    def sequential(self) -> bool:
        """Whether its mixer scans tokens one after the other, so that rows must not be permuted."""
        return isinstance(self.mixer, MambaConfig)

    @property
    def of_all_tokens(self) -> tuple[str, ...]:
        """The options, as `name=value`, because of which a part looks at all tokens of a microbatch or has a loss over them."""
        return tuple(option for part in self.parts for option in part_of(part).of_all_tokens(part))


@dataclass(frozen=True)
class MultiTokenConfig:
    """The layer for further tokens, and the weight of its loss. Raises ConfigError unless the weight is positive and finite."""

    layer: LayerConfig
    loss_weight: float

    def __post_init__(self) -> None:
        if not 0 < self.loss_weight < math.inf:
            raise ConfigError(
                f"cannot predict further tokens with mtp_loss_weight={self.loss_weight}: it must be positive, or None (null) for "
                "a model without the layer"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that the mathematics of a decoder depends on.

    norm:            the final norm, before the head.
    ropes:           the rotations, each with its name; the config of a mixer names the one that it uses.
    embed_scale:     what embeddings are multiplied by, rounded to their dtype (Gemma: sqrt(hidden_size)).
    num_positions:   number of learned positions, None for none.
    logits_soft_cap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2).
    vocab_multiple:  the vocabulary is padded to a multiple of this, inside the model only.
    multi_token:     the layer that learns the token after the next, None for none.
    logits_chunk:    None computes all logits at once. A number computes the loss for that many tokens at a time and does not keep
                     their logits.
    dropout:         with which probability training drops each feature of an embedding.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()  # noqa: RUF009 (it is frozen)
    ropes: tuple[tuple[str, Rope], ...] = ()
    initializer_range: float = 0.02
    tied: bool = False
    embed_scale: float | None = None
    num_positions: int | None = None
    logits_soft_cap: float | None = None
    multi_token: MultiTokenConfig | None = None
    vocab_multiple: int = 128
    logits_chunk: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.logits_chunk is not None and self.logits_soft_cap is not None:
            raise ConfigError(
                f"cannot compute the loss from logits_chunk={self.logits_chunk} tokens at a time: this model bounds its logits "
                f"(soft cap {self.logits_soft_cap}), which the loss in chunks does not do. Use logits_chunk=None."
            )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def every_layer(self) -> tuple[LayerConfig, ...]:
        """The layers, followed by the layer for further tokens if there is one."""
        return self.layers if self.multi_token is None else (*self.layers, self.multi_token.layer)

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training, so that batches need numbers of tokens."""
        return any((self.dropout, *(layer.dropout for layer in self.every_layer)))

    @property
    def side_losses(self) -> bool:
        """Whether any layer has side losses or looks at all tokens, so that the context needs the batch's total token weight."""
        return any(layer.of_all_tokens for layer in self.every_layer)

    @property
    def can_decode(self) -> bool:
        """Whether every layer can go on from a state, and no rotation of earlier tokens changes as the row grows."""
        fixed_ropes = not any(depends_on_length(rope) for _, rope in self.ropes)
        return fixed_ropes and all(part_of(layer.mixer).decode is not None for layer in self.layers)

    @property
    def forbids_slices(self) -> str | None:
        """Why rows cannot be cut into slices; None if they can."""
        if any(part_of(layer.mixer).slice is None for layer in self.every_layer):
            return "at least one of its layers mixes tokens in a way that needs whole rows."
        if len({layer.sequential for layer in self.layers}) > 1:
            return "some of its layers scan, and read no order of positions, but its other layers need this order for slices."
        options = dict.fromkeys(option for layer in self.every_layer for option in layer.of_all_tokens)
        if options:
            return (
                f"its routers look at all tokens of a microbatch, because of {', '.join(options)}.\n"
                "Use routers (model.router) without these options; the choice_bias of DeepSeek-V3 balances without a loss."
            )
        return None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the size of the vocabulary, rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def with_dropout(config: DecoderConfig, rate: float) -> DecoderConfig:
    """The same config, but training drops features of embeddings, and of what parts add to the residual stream, at this rate.

    Raises ConfigError unless it is in [0, 1).
    """
    check_rate("dropout", rate)
    further = config.multi_token
    if further is not None:
        further = replace(further, layer=replace(further.layer, dropout=rate))
    layers = tuple(replace(layer, dropout=rate) for layer in config.layers)
    return replace(config, layers=layers, multi_token=further, dropout=rate)


def with_mlp_chunk(config: DecoderConfig, chunk: int | None) -> DecoderConfig:
    """The same config, but feed-forward layers and shared experts compute `chunk` tokens at a time (None: all).

    Raises ConfigError if the model has no such layers, or if they have biases.
    """
    layers = tuple(replace(layer, mlp=_with_chunk(layer.mlp, chunk)) for layer in config.layers)
    dense = [layer.mlp.shared if isinstance(layer.mlp, MoeConfig) else layer.mlp for layer in layers]
    if chunk is not None and not any(dense):
        raise ConfigError(f"cannot use mlp_chunk={chunk}: this model has no feed-forward layer that every token goes through")
    further = config.multi_token
    if further is not None:
        further = replace(further, layer=replace(further.layer, mlp=_with_chunk(further.layer.mlp, chunk)))
    return replace(config, layers=layers, multi_token=further)


def _with_chunk(mlp: Mlp | None, chunk: int | None) -> Mlp | None:
    if isinstance(mlp, MoeConfig):
        return replace(mlp, shared=None if mlp.shared is None else replace(mlp.shared, chunk=chunk))
    return None if mlp is None else replace(mlp, chunk=chunk)
