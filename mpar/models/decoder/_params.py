"""The parameter tree of a decoder, and the same tree with shapes, or with logical axes, as leaves."""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from mpar.chain import Axes
from mpar.models.decoder._config import DecoderConfig, LayerConfig
from mpar.models.layers import PartConfig, PartParams, Sizes, is_sizes, part_of
from mpar.tree import Leaf, flatten, struct, unflatten

__all__ = ["Block", "DecoderParams", "Embed", "Head", "MultiToken", "axes", "meta_params", "norm_leaves", "part_params", "shapes"]

T = TypeVar("T")


@struct
class Embed(Generic[Leaf]):
    """The embedding of tokens, with a row for each id and zero rows for padding; and that of positions, if they are learned."""

    table_VD: Leaf
    positions_SD: Leaf | None = None


@struct
class Block(Generic[Leaf]):
    """One layer. `Part.field` names the field of each part. Each part may have a norm before it, and one after it ("post")."""

    attn_norm_D: Leaf | None = None
    attention: PartParams[Leaf] | None = None
    mlp_norm_D: Leaf | None = None
    mlp: PartParams[Leaf] | None = None
    attn_norm_bias_D: Leaf | None = None
    mlp_norm_bias_D: Leaf | None = None
    attn_post_norm_D: Leaf | None = None
    mlp_post_norm_D: Leaf | None = None
    attn_post_norm_bias_D: Leaf | None = None
    mlp_post_norm_bias_D: Leaf | None = None
    mamba: PartParams[Leaf] | None = None


@struct
class Head(Generic[Leaf]):
    """The final norm and the output matrix. The matrix is None in a tied model, which uses the embedding instead."""

    norm_D: Leaf
    head_DV: Leaf | None = None
    norm_bias_D: Leaf | None = None


@struct
class MultiToken(Generic[Leaf]):
    """For further tokens: norms of the two inputs, matrices that join them, the layer, and the norm before the shared head."""

    embed_norm_D: Leaf
    hidden_norm_D: Leaf
    embed_DD: Leaf
    hidden_DD: Leaf
    block: Block[Leaf]
    norm_D: Leaf


@struct
class DecoderParams(Generic[Leaf]):
    """The parameter tree."""

    embed: Embed[Leaf]
    layers: tuple[Block[Leaf], ...]
    head: Head[Leaf]
    mtp: MultiToken[Leaf] | None = None


def part_params(block: Block[Tensor], config: PartConfig) -> PartParams[Tensor]:
    """The parameters of one of the layer's parts."""
    params = {"attention": block.attention, "mlp": block.mlp, "mamba": block.mamba}[part_of(config).field]
    assert params is not None
    return params


def norm_leaves(block: Block[Tensor], place: str) -> tuple[Tensor | None, Tensor | None]:
    """Gain and bias of a norm: "attn" and "mlp" are before the parts, "attn_post" and "mlp_post" after them."""
    return {
        "attn": (block.attn_norm_D, block.attn_norm_bias_D),
        "mlp": (block.mlp_norm_D, block.mlp_norm_bias_D),
        "attn_post": (block.attn_post_norm_D, block.attn_post_norm_bias_D),
        "mlp_post": (block.mlp_post_norm_D, block.mlp_post_norm_bias_D),
    }[place]


def _block(layer: LayerConfig, make_part: Callable[[PartConfig], PartParams[Leaf]], norm_leaf: Leaf) -> Block[Leaf]:
    """The tree of one layer; every gain and bias of its norms is `norm_leaf`."""
    parts = {part_of(config).field: make_part(config) for config in layer.parts}
    before = norm_leaf if layer.norms in ("pre", "both") else None
    after = norm_leaf if layer.norms in ("post", "both") else None
    bias, has_mlp = layer.norm.bias, layer.mlp is not None
    return Block(
        attn_norm_D=before,
        attention=parts.get("attention"),
        mlp_norm_D=before if has_mlp else None,
        mlp=parts.get("mlp"),
        attn_norm_bias_D=before if bias else None,
        mlp_norm_bias_D=before if bias and has_mlp else None,
        attn_post_norm_D=after,
        mlp_post_norm_D=after if has_mlp else None,
        attn_post_norm_bias_D=after if bias else None,
        mlp_post_norm_bias_D=after if bias and has_mlp else None,
        mamba=parts.get("mamba"),
    )


@functools.cache
def _block_shapes(layer: LayerConfig, hidden_size: int) -> Block[Sizes]:
    return _block(layer, lambda config: part_of(config).shapes(config, hidden_size), (hidden_size,))


@functools.cache
def _block_axes(layer: LayerConfig) -> Block[Axes]:
    return _block(layer, lambda config: _where_present(part_of(config).axes, part_of(config).shapes(config, 1)), ("embed",))


def shapes(config: DecoderConfig) -> DecoderParams[Sizes]:
    """The parameter tree with a tuple of sizes for each leaf."""
    D, V, S = config.hidden_size, config.padded_vocab_size, config.num_positions
    return DecoderParams(
        embed=Embed(table_VD=(V, D), positions_SD=None if S is None else (S, D)),
        layers=tuple(_block_shapes(layer, D) for layer in config.layers),
        head=Head(norm_D=(D,), head_DV=None if config.tied else (D, V), norm_bias_D=(D,) if config.norm.bias else None),
        mtp=None
        if config.multi_token is None
        else MultiToken(
            embed_norm_D=(D,),
            hidden_norm_D=(D,),
            embed_DD=(D, D),
            hidden_DD=(D, D),
            block=_block_shapes(config.multi_token.layer, D),
            norm_D=(D,),
        ),
    )


_EMBED_AXES: Embed[Axes] = Embed(table_VD=("vocab", "embed"), positions_SD=(None, "embed"))
_HEAD_AXES: Head[Axes] = Head(norm_D=("embed",), head_DV=("embed", "vocab"), norm_bias_D=("embed",))


def axes(config: DecoderConfig) -> DecoderParams[Axes]:
    """The parameter tree with the logical axes of each leaf."""
    like = shapes(config)
    return DecoderParams(
        embed=_where_present(_EMBED_AXES, like.embed),
        layers=tuple(_block_axes(layer) for layer in config.layers),
        head=_where_present(_HEAD_AXES, like.head),
        mtp=None
        if config.multi_token is None
        else MultiToken(
            embed_norm_D=("embed",),
            hidden_norm_D=("embed",),
            embed_DD=("embed", None),
            hidden_DD=("embed", None),
            block=_block_axes(config.multi_token.layer),
            norm_D=("embed",),
        ),
    )


def _where_present(full: T, like: Any) -> T:
    """The struct `full` with None wherever the struct `like` has None."""
    fields = {}
    for name, value in vars(like).items():
        full_value = getattr(full, name)
        fields[name] = None if value is None else full_value if is_sizes(value) else _where_present(full_value, value)
    return type(full)(**fields)


def meta_params(config: DecoderConfig, dtype: torch.dtype) -> DecoderParams[Tensor]:
    """The parameter tree with tensors that have no data."""
    leaves, structure = flatten(shapes(config), is_leaf=is_sizes)
    without_data = [torch.empty(shape, dtype=dtype, device="meta") for shape in leaves]
    return cast(DecoderParams[Tensor], unflatten(structure, without_data))
