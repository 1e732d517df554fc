"""Dropout by the numbers of tokens: what is dropped of a token depends on its number alone, wherever the token is computed.

`dropout` counts elements by their index in the tensor. A training step cuts its batch into microbatches, slices and shards, and
permutes rows, so that indices say nothing of a token. Here the counter of Philox holds a number that each token was given before.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._random import KEY_MASK, fold_key, philox
from mpar.ops.primitive import Cost, Primitive, ShardingRule

__all__ = ["token_dropout"]

token_dropout_p = Primitive("token_dropout", "x, draw, segment -> y", rate="float", key="int[]", token_dims="int", starts="int[]")

_DRAWN = 8  # numbers of 16 bits for neighbours that four words of 32 bits give
_BLOCK = 1 << 14  # counters at once on a CPU: few enough to stay in a cache
_MAX_FEATURE_DIMS = 2  # two of the four words of a counter are for the number of the token, one is for each dim of features


def token_dropout(x: Tensor, rate: float, draw: Tensor, segment: Tensor, label: str) -> Tensor:
    """Each element of `x` is replaced by 0 with probability `rate`, rounded up to 16 bits, or else divided by `1 - rate`.

    Which ones depends on the number of the token, on the index among its features, on `segment` and on `label`.

    x:       (*tokens, features) or (*tokens, heads, features).
    draw:    int64 (*tokens): the number of each token, which no other token of the whole training has.
    segment: int64, 0-d: the number of the layer. It is a tensor, so that equal layers are one program.
    label:   what tells several dropouts of a layer apart, such as "attn".
    Raises ConfigError unless 0 <= rate < 1, ShapeError for other shapes, DtypeError if `x` is not floating.
    """
    if rate == 0:
        return x
    starts = [0] * (x.ndim - draw.ndim)
    return token_dropout_p.bind(
        x, draw, segment, rate=rate, key=list(fold_key(0, "token_dropout", label)), token_dims=draw.ndim, starts=starts
    )


@token_dropout_p.def_abstract
def _abstract(x, draw, segment, *, rate, key, token_dims, starts):
    if draw.dtype != torch.int64 or segment.dtype != torch.int64 or segment.ndim:
        raise ShapeError(
            f"token_dropout: draw is {tuple(draw.shape)} {draw.dtype} and segment {tuple(segment.shape)} {segment.dtype}; "
            "both must be int64, and segment a scalar"
        )
    features = x.ndim - token_dims
    if tuple(draw.shape) != tuple(x.shape[:token_dims]) or not 1 <= features <= _MAX_FEATURE_DIMS or len(starts) != features:
        raise ShapeError(
            f"token_dropout: x {tuple(x.shape)} does not fit draw {tuple(draw.shape)}: x has the dims of draw, then one of "
            "features, or one of heads and one of features"
        )
    if not x.is_floating_point():
        raise DtypeError(f"token_dropout: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    if not 0 <= rate < 1:
        raise ConfigError(f"token_dropout: rate is {rate}; it must be in [0, 1)")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@token_dropout_p.def_impl
def _impl(
    x: Tensor,
    draw: Tensor,
    segment: Tensor,
    *,
    rate: float,
    key: Sequence[int],
    token_dims: int,
    starts: Sequence[int],
) -> Tensor:
    heads, start = (range(starts[0], starts[0] + x.shape[-2]), starts[1]) if len(starts) > 1 else (range(1), starts[0])
    first, skip = divmod(start, _DRAWN)
    groups = torch.arange(first, first + (skip + x.shape[-1] + _DRAWN - 1) // _DRAWN, device=x.device)
    heads_N1 = torch.arange(heads.start, heads.stop, device=x.device)[:, None]
    philox_key = (segment.bitwise_xor(key[0]) & KEY_MASK, torch.full_like(segment, key[1]))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).div_(1 - rate)
    y_TNF, draw_T11 = y.view(-1, len(heads), x.shape[-1]), draw.reshape(-1, 1, 1)
    tokens = max(1, _BLOCK // (len(heads) * len(groups))) if x.device.type == "cpu" else len(draw_T11)
    for first_token in range(0, len(draw_T11), tokens):
        block = slice(first_token, first_token + tokens)
        counter = groups, heads_N1, draw_T11[block] & KEY_MASK, (draw_T11[block] >> 32) & KEY_MASK
        words = philox(counter, philox_key)
        dropped = [half < rate * 2**16 for word in words for half in (word & 0xFFFF, word >> 16)]
        y_TNF[block].masked_fill_(torch.stack(dropped, -1).flatten(-2)[..., skip : skip + x.shape[-1]], 0.0)
    return y


@token_dropout_p.def_vjp_by_ops("draw, segment, dy -> dx")  # it is linear in x: the gradient is dropped with the same mask
def _vjp(draw, segment, dy, **params):
    return token_dropout_p.bind(dy, draw, segment, **params)


def _sharded(emit, x, draw, segment, *, rate, key, token_dims, starts):
    shifts = [emit.start_of(f"d{i}") for i in range(len(starts))]
    shifted = [shift if start == 0 else emit(operator.add, shift, start) for start, shift in zip(starts, shifts, strict=True)]
    return emit(token_dropout_p, x, draw, segment, rate=rate, key=key, token_dims=token_dims, starts=shifted)


def _rule(*, rate, key, token_dims, starts):
    tokens = tuple((f"t{i}",) for i in range(token_dims))
    features = tuple((f"d{i}",) for i in range(len(starts)))
    return ShardingRule(((*tokens, *features), tokens, ()), ((*tokens, *features),), frozenset(), frozenset({"x"}))


token_dropout_p.def_sharding_from(_rule)
for _dim in range(_MAX_FEATURE_DIMS):
    token_dropout_p.def_sharded(f"d{_dim}")(_sharded)
token_dropout_p.def_batching_loop()
token_dropout_p.def_cost(lambda x, *_, **__: Cost(flops=50 * x.numel(), bytes=2 * x.nbytes, workspace=32 * _BLOCK))
