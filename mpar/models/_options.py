"""Options of a model that a Hugging Face config.json does not contain."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from mpar.errors import ConfigError
from mpar.models.architectures import Architecture
from mpar.models.decoder import DecoderConfig, MultiTokenConfig, with_dropout, with_mlp_chunk
from mpar.models.layers import MoeConfig, with_router_options

__all__ = ["ModelOptions", "OptionWords", "with_options"]


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that a config.json does not contain. `build`, `from_config`, `from_hf` take it, or its fields by name.

    dtype:           dtype of the parameters. None: float32, or in `from_hf` the dtype of the stored tensors.
    ignore:          keys of the config that mpar does not know and may ignore, because they change nothing.
    vocab_multiple:  the vocabulary is padded to a multiple of this, inside the model only.
    logits_chunk:    for how many tokens at a time the loss computes logits; None: for all, and the logits are kept.
    mlp_chunk:       how many tokens at a time feed-forward layers and shared experts compute; None: all.
    router:          options for all routers of experts, see `with_router_options`: {"kind": "sinkhorn", "z_loss": 1e-3}.
    mtp_loss_weight: if given, the model gets multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): one more layer
                     with the config of the last one, which learns the token after the next. Its loss is multiplied by this.
    dropout:         with which probability training drops each feature of embeddings and of what attention and feed-forward
                     layers add to the residual stream. None: nothing is dropped, whatever the config says.
    Raises ConfigError for a dtype that is not floating, and for paddings and chunks that are not positive.
    """

    dtype: torch.dtype | None = None
    ignore: tuple[str, ...] = ()
    vocab_multiple: int = 128
    logits_chunk: int | None = None
    mlp_chunk: int | None = None
    router: Mapping[str, object] | None = None
    mtp_loss_weight: float | None = None
    dropout: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.dtype is not None and not self.dtype.is_floating_point:
            problems.append(f"dtype={self.dtype}: choose a floating dtype")
        sizes = {"vocab_multiple": self.vocab_multiple, "logits_chunk": self.logits_chunk}
        problems += [f"{name}={size}: must be a positive int" for name, size in sizes.items() if size is not None and size < 1]
        if problems:
            raise ConfigError("cannot make a model:\n" + "\n".join(f"  {problem}" for problem in problems))


class OptionWords(TypedDict, total=False):
    """The fields of ModelOptions, as keywords."""

    dtype: torch.dtype | None
    ignore: tuple[str, ...]
    vocab_multiple: int
    logits_chunk: int | None
    mlp_chunk: int | None
    router: Mapping[str, object] | None
    mtp_loss_weight: float | None
    dropout: float | None


def with_options(
    config: DecoderConfig, options: ModelOptions, architecture: Architecture, architectures: Mapping[str, Architecture]
) -> DecoderConfig:
    """`config`, the decoder of a model of `architecture`, changed as `options` ask.

    Raises ConfigError for options that this decoder cannot have; the message may name `architectures` that can.
    """
    config = replace(config, vocab_multiple=options.vocab_multiple, logits_chunk=options.logits_chunk)
    if options.router:
        config = _with_router(config, options.router, architecture)
    if options.mtp_loss_weight is not None:
        if architecture.layers_behind is None:
            able = ", ".join(sorted(name for name, other in architectures.items() if other.layers_behind is not None))
            raise ConfigError(
                f"cannot make a {architecture.name}: mtp_loss_weight={options.mtp_loss_weight} asks for a layer for further "
                f"tokens, which {architecture.name} models do not have ({able} ones do). Leave mtp_loss_weight out (null)."
            )
        config = replace(config, multi_token=MultiTokenConfig(config.layers[-1], options.mtp_loss_weight))
    if options.dropout is not None:
        config = with_dropout(config, options.dropout)
    return config if options.mlp_chunk is None else with_mlp_chunk(config, options.mlp_chunk)


def _with_router(config: DecoderConfig, router: Mapping[str, object], architecture: Architecture) -> DecoderConfig:
    """`config` with the options `router` in every layer of experts."""
    if not any(isinstance(layer.mlp, MoeConfig) for layer in config.layers):
        raise ConfigError(
            f"cannot make a {architecture.name}: router={dict(router)} is for layers of experts, and this model has none"
        )
    layers = [
        replace(layer, mlp=with_router_options(layer.mlp, router)) if isinstance(layer.mlp, MoeConfig) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))
