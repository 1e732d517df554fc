"""Random numbers as a function of a key and an index: they are the same on every mesh, and the same when they are recomputed.

Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in integer tensor ops. The counter is the
global index of an element, so that a shard has the same elements as the global tensor.
"""

import hashlib
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive, ShardingRule

__all__ = ["Key", "dropout", "fold_in", "fold_key", "random_normal", "random_quads", "random_uniform"]

Key = Tensor | tuple[int, int]
"""Two numbers of 32 bits: a tuple from `fold_key`, or an int64 tensor (2,)."""

random_uniform_p = Primitive("random_uniform", "key -> y", shape="int[]", starts="int[]")
random_normal_p = Primitive("random_normal", "key -> y", shape="int[]", starts="int[]")
dropout_p = Primitive("dropout", "x, key -> y", rate="float", starts="int[]")
fold_in_p = Primitive("fold_in", "key, data -> folded")

_MAX_DIMS = 4  # a counter is four words of 32 bits, one for each dim
KEY_MASK = 0xFFFFFFFF  # of a word of 32 bits
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def fold_key(seed: int, *parts: int | str) -> tuple[int, int]:
    """A key for `seed` and the names and numbers in `parts`, such as the path of a parameter; other parts give unrelated keys."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def fold_in(key: Key, data: Tensor | int) -> Tensor:
    """A key (2,) for `key` and the integer `data`, such as the number of a step; `data` may be a 0-d tensor."""
    key = _as_tensor(key)
    return fold_in_p.bind(key, torch.as_tensor(data, dtype=torch.int64, device=key.device))


def random_uniform(key: Key, shape: Sequence[int], *, starts: Sequence[int] | None = None) -> Tensor:
    """float32 numbers in [0, 1) with 24 random bits each.

    With `starts`, these are the numbers of a larger tensor from this global index on: element i of dim d is its element
    starts[d] + i. Shapes have up to 4 dims. Raises ShapeError for more, or for negative sizes or starts.
    """
    starts = [0] * len(shape) if starts is None else list(starts)
    return random_uniform_p.bind(_as_tensor(key), shape=list(shape), starts=starts)


def random_quads(keys_N2: Tensor, quads_N: Tensor) -> Tensor:
    """Of the vectors that `random_uniform` gives for the keys, four elements each, from number 4 * quad on: (N, 4)."""
    zero = quads_N.new_zeros(())
    words = philox((quads_N, zero, zero, zero), keys_N2.unbind(1))
    return (torch.stack(words, -1) >> 8).to(torch.float32).mul_(2.0**-24)


def random_normal(key: Key, shape: Sequence[int], *, starts: Sequence[int] | None = None) -> Tensor:
    """float32 numbers of mean 0 and variance 1, by the transform of Box & Muller (1958); arguments as in `random_uniform`."""
    starts = [0] * len(shape) if starts is None else list(starts)
    return random_normal_p.bind(_as_tensor(key), shape=list(shape), starts=starts)


def dropout(x: Tensor, rate: float, key: Key) -> Tensor:
    """Each element of `x` is replaced by 0 with probability `rate`, or else divided by `1 - rate`. `x` has up to 4 dims.

    Raises ConfigError unless 0 <= rate < 1, ShapeError for more dims, DtypeError if `x` is not floating.
    """
    if rate == 0:
        return x
    return dropout_p.bind(x, _as_tensor(key), rate=rate, starts=[0] * x.ndim)


def _as_tensor(key: Key) -> Tensor:
    return key if isinstance(key, Tensor) else torch.tensor(key, dtype=torch.int64)


def _check(name: str, key: Tensor, shape: Sequence[int], starts: Sequence[int]) -> None:
    if tuple(key.shape) != (2,) or key.dtype != torch.int64:
        raise ShapeError(f"{name}: the key is {tuple(key.shape)} {key.dtype}; it must be an int64 tensor (2,), as fold_key gives")
    if len(shape) > _MAX_DIMS or len(shape) != len(starts):
        raise ShapeError(f"{name}: shape {tuple(shape)} with starts {tuple(starts)}: at most {_MAX_DIMS} dims, one start each")
    if any(n < 0 for n in shape) or any(isinstance(s, int) and s < 0 for s in starts):
        raise ShapeError(f"{name}: shape {tuple(shape)} with starts {tuple(starts)}: sizes and starts must not be negative")


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each counter. A counter is four words, which are broadcast; all are int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # the product of two words wraps around in 64 signed bits, but both of its halves are right after masking
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) & KEY_MASK) ^ c1 ^ k0
        c2 = ((first >> 32) & KEY_MASK) ^ c3 ^ k1
        c1, c3 = second & KEY_MASK, first & KEY_MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & KEY_MASK, (k1 + _KEY_STEPS[1]) & KEY_MASK
    return c0, c1, c2, c3


def _quads(key: Tensor, shape: Sequence[int], starts: Sequence[int]) -> tuple[list[Tensor], int]:
    """`(words, skip)`: four words for every aligned group of four neighbours in the last dim, which start `skip` elements before
    the first element."""
    sizes, starts = (list(shape), list(starts)) if shape else ([1], [0])
    first, skip = divmod(starts[-1], 4)
    count = (skip + sizes[-1] + 3) // 4
    ranges = [*((start, size) for start, size in zip(starts[:-1], sizes[:-1], strict=True)), (first, count)]
    dims = [
        torch.arange(start, start + size, device=key.device).view(-1, *[1] * (len(ranges) - 1 - i))
        for i, (start, size) in enumerate(ranges)
    ]
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    counter = [*reversed(dims), *[zero] * (_MAX_DIMS - len(dims))]
    words = philox(counter, key.unbind())
    return list(torch.broadcast_tensors(*words)), skip


def lay_out(quads: Sequence[Tensor], skip: int, shape: Sequence[int]) -> Tensor:
    rows = torch.stack(list(quads), -1).flatten(-2)
    return rows[..., skip : skip + (shape[-1] if shape else 1)].reshape(list(shape)).contiguous()


@random_uniform_p.def_abstract
def _abstract_uniform(key, *, shape, starts):
    _check("random_uniform", key, shape, starts)
    return torch.empty(list(shape), dtype=torch.float32, device=key.device)


@random_uniform_p.def_impl
def _impl_uniform(key: Tensor, *, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    words, skip = _quads(key, shape, starts)
    return lay_out([(word >> 8).to(torch.float32) for word in words], skip, shape).mul_(2.0**-24)


@random_normal_p.def_abstract
def _abstract_normal(key, *, shape, starts):
    _check("random_normal", key, shape, starts)
    return torch.empty(list(shape), dtype=torch.float32, device=key.device)


@random_normal_p.def_impl
def _impl_normal(key: Tensor, *, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    words, skip = _quads(key, shape, starts)
    values = []
    for size, turn in (words[:2], words[2:]):
        # in float64, rounded once at the end, so that the bits do not depend on how elements are grouped into vectors
        radius = ((size + 1).double() * 2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = turn.double() * (2.0 * math.pi * 2.0**-32)
        values += [(radius * angle.cos()).float(), (radius * angle.sin()).float()]
    return lay_out(values, skip, shape)


@dropout_p.def_abstract
def _abstract_dropout(x, key, *, rate, starts):
    _check("dropout", key, x.shape, starts)
    if not x.is_floating_point():
        raise DtypeError(f"dropout: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout: rate is {rate}; it must be in [0, 1)")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dropout_p.def_impl
def _impl_dropout(x: Tensor, key: Tensor, *, rate: float, starts: Sequence[int]) -> Tensor:
    dropped = _impl_uniform(key, shape=x.shape, starts=starts) < rate
    return (x.contiguous() / (1 - rate)).masked_fill_(dropped, 0.0)


@dropout_p.def_vjp_by_ops("key, dy -> dx")  # dropout is linear in x: the gradient is dropout with the same mask
def _vjp(key, dy, *, rate, starts):
    return dropout_p.bind(dy, key, rate=rate, starts=starts)


@fold_in_p.def_abstract
def _abstract_fold(key, data):
    _check("fold_in", key, (), ())
    if data.ndim or data.dtype != torch.int64:
        raise ShapeError(f"fold_in: data is {tuple(data.shape)} {data.dtype}; it must be a 0-d int64 tensor")
    return torch.empty(2, dtype=torch.int64, device=key.device)


@fold_in_p.def_impl
def _impl_fold(key: Tensor, data: Tensor) -> Tensor:
    # the last word is all ones, which is the counter of no element of a tensor
    last = torch.full_like(data, KEY_MASK)
    words = philox((data & KEY_MASK, (data >> 32) & KEY_MASK, torch.zeros_like(data), last), key.unbind())
    return torch.stack(words[:2])


def _dims(starts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple((f"d{i}",) for i in range(len(starts)))


def _shifted(emit, starts):
    """`starts` of this rank's shard. All sharded dims are shifted, so that one local program serves all factors."""
    shifts = [emit.start_of(f"d{i}") for i in range(len(starts))]
    return [shift if start == 0 else emit(operator.add, shift, start) for start, shift in zip(starts, shifts, strict=True)]


def _sharded_dropout(emit, x, key, *, rate, starts):
    return emit(dropout_p, x, key, rate=rate, starts=_shifted(emit, starts))


def _sharded_draw(primitive: Primitive):
    def local_program(emit, key, *, shape, starts):
        sizes = [emit.extent_of(f"d{i}") for i in range(len(shape))]
        return emit(primitive, key, shape=sizes, starts=_shifted(emit, starts))

    return local_program


for _primitive in (random_uniform_p, random_normal_p):
    _primitive.def_sharding_from(
        lambda *, shape, starts: ShardingRule(((("key",),),), (_dims(starts),), frozenset({"key"}), frozenset())
    )
    _primitive.def_batching_loop()
    _primitive.def_cost(
        lambda key, *, shape, starts: Cost(100 * math.prod(shape), 4 * math.prod(shape), workspace=32 * math.prod(shape))
    )
    for _dim in range(_MAX_DIMS):
        _primitive.def_sharded(f"d{_dim}")(_sharded_draw(_primitive))

dropout_p.def_sharding_from(
    lambda *, rate, starts: ShardingRule((_dims(starts), (("key",),)), (_dims(starts),), frozenset({"key"}), frozenset({"x"}))
)
for _dim in range(_MAX_DIMS):
    dropout_p.def_sharded(f"d{_dim}")(_sharded_dropout)
dropout_p.def_batching_loop()
dropout_p.def_cost(lambda x, key, **_: Cost(flops=100 * x.numel(), bytes=2 * x.nbytes, workspace=32 * x.numel()))
fold_in_p.def_sharding("key,  -> key", need_replication="key")
fold_in_p.def_batching_loop()
fold_in_p.def_cost(lambda key, data: Cost(flops=100, bytes=40))
