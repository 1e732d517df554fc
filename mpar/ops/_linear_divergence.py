"""The divergence between the distributions of two models, student and teacher, from their features and output matrices, without
the logits of all tokens: those of a chunk of tokens at a time, which the backward computes again.

Generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, eq. 1): with S and T the distributions of a token,
    beta KL(T || M) + (1 - beta) KL(S || M), where M = beta T + (1 - beta) S;
beta 0 is KL(T || S), beta 1 is KL(S || T). Only the student has gradients. That of its logit v is S_v (g_v - sum_u S_u g_u) with
g = (1 - beta) log(S / M); of beta 1 with g = log(S / T); of beta 0 it is S_v - T_v.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._product import add_product, product_into
from mpar.ops.primitive import Cost, Primitive

__all__ = ["linear_divergence"]

_PARAMS = {"beta": "float", "temperature": "float", "vocab_size": "int", "start": "int", "chunk": "int"}
linear_divergence_p = Primitive(
    "linear_divergence", "x, head, y, other -> divergence, agreement, lse, other_lse, slope", **_PARAMS
)
linear_divergence_stats_p = Primitive("linear_divergence_stats", "x, head, y, other -> lse, peak, best", **_PARAMS)
"""Of the columns of a shard, for student and teacher (..., 2): log-sum-exp, highest logit, and minus the number of its column."""
linear_divergence_terms_p = Primitive(
    "linear_divergence_terms", "x, head, y, other, lse, other_lse -> divergence, slope", **_PARAMS
)
"""What the columns of a shard contribute, for log-sum-exps over all columns."""

_BLOCK = 1 << 17
"""Elements of a block of rows, for which there are several intermediate values."""
_VALUES_OF_BLOCK = 8
"""How many values as large as a block are alive at most."""


def linear_divergence(
    x: Tensor,
    head_DV: Tensor,
    y: Tensor,
    other_EV: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`(divergence, agreement)` of each token, (...), float32 or wider: the divergence in nats, and 1 where both find the same
    token likeliest, else 0.

    `x` (..., D) and `head_DV` make the logits of the student, `y` (..., E) and `other_EV` those of the teacher, both of which
    are divided by `temperature`; columns from `vocab_size` on are padding. Logits exist for `chunk` tokens at a time. `y` and
    `other_EV` get no gradient, `agreement` has none; the gradient of `head_DV` is accumulated in float32 or wider.
    Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    size = head_DV.shape[-1] if vocab_size is None else vocab_size
    params = {"beta": float(beta), "temperature": float(temperature), "vocab_size": size, "start": 0, "chunk": chunk}
    divergence, agreement, *_ = linear_divergence_p.bind(x, head_DV, y, other_EV, **params)
    return divergence, agreement


def _checked(x, head, y, other, *, beta, temperature, vocab_size, start, chunk) -> torch.dtype:
    """The dtype of what is computed of logits. Raises what `linear_divergence` raises."""
    shapes = f"x {tuple(x.shape)}, head {tuple(head.shape)}, y {tuple(y.shape)}, other {tuple(other.shape)}"
    fits = head.ndim == other.ndim == 2 and x.ndim >= 1 and x.shape[-1] == head.shape[0] and y.shape[-1:] == other.shape[:1]
    if not fits or x.shape[:-1] != y.shape[:-1] or head.shape[1] != other.shape[1]:
        raise ShapeError(f"linear_divergence: {shapes}: they must be (..., D), (D, V), (..., E) and (E, V)")
    if x.dtype != head.dtype or y.dtype != other.dtype or not (x.is_floating_point() and y.is_floating_point()):
        dtypes = ", ".join(str(operand.dtype) for operand in (x, head, y, other))
        raise DtypeError(f"linear_divergence: dtypes are {dtypes}; x and head, y and other must have the same floating dtype")
    if not 0 <= beta <= 1 or temperature <= 0 or vocab_size < 1 or chunk < 1:
        raise ConfigError(
            f"linear_divergence: beta={beta}, temperature={temperature}, vocab_size={vocab_size}, chunk={chunk}: beta is from 0 "
            "to 1, the others above 0"
        )
    return torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)


@linear_divergence_p.def_abstract
def _abstract(x, head, y, other, **params):
    wide = _checked(x, head, y, other, **params)
    return tuple(torch.empty(x.shape[:-1], dtype=wide, device=x.device) for _ in range(5))


@linear_divergence_stats_p.def_abstract
def _abstract_stats(x, head, y, other, **params):
    wide = _checked(x, head, y, other, **params)
    return tuple(torch.empty((*x.shape[:-1], 2), dtype=wide, device=x.device) for _ in range(3))


@linear_divergence_terms_p.def_abstract
def _abstract_terms(x, head, y, other, lse, other_lse, **params):
    wide = _checked(x, head, y, other, **params)
    return tuple(torch.empty(x.shape[:-1], dtype=wide, device=x.device) for _ in range(2))


@dataclass(frozen=True)
class _Block:
    """The scaled logits of both models for some tokens, over those columns of a shard that are tokens; float32 or wider.

    tokens: which ones of all. rows: which ones of the chunk.
    """

    tokens: slice
    rows: slice
    student_TV: Tensor
    teacher_TV: Tensor


@dataclass(frozen=True)
class _Chunks:
    """The logits of a chunk of tokens at a time, block by block, in two buffers that all chunks share.

    operands: features and matrix of the student, then of the teacher; tokens are the rows of features.
    wide:     the dtype of what is computed of logits. width: how many columns are tokens, not padding. start: the first one.
    block:    how many tokens are in a block.
    """

    operands: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[Tensor, ...]
    wide: torch.dtype
    width: int
    start: int
    block: int
    temperature: float

    @classmethod
    def of(cls, x, head, y, other, *, temperature, vocab_size, start, chunk, **_) -> "_Chunks":
        """For operands of a primitive, and its parameters."""
        x_TD, y_TE, num_columns = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), head.shape[1]
        return cls(
            ((x_TD, head.contiguous()), (y_TE, other.contiguous())),
            tuple(a.new_empty(min(chunk, x_TD.shape[0]), num_columns) for a in (x, y)),
            torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32),
            min(max(vocab_size - start, 0), num_columns),
            start,
            max(1, _BLOCK // num_columns),
            temperature,
        )

    @property
    def x_TD(self) -> Tensor:
        """The features of the student."""
        return self.operands[0][0]

    @property
    def head(self) -> Tensor:
        """The matrix of the student, contiguous."""
        return self.operands[0][1]

    def empty(self, *more: int) -> Tensor:
        """A value of each token."""
        return torch.empty((self.x_TD.shape[0], *more), dtype=self.wide, device=self.x_TD.device)

    def tiles(self) -> Iterator[slice]:
        """The tokens of each chunk, whose logits are in the buffers then."""
        num_tokens, chunk = self.x_TD.shape[0], self.buffers[0].shape[0]
        for first in range(0, num_tokens, max(1, chunk)):
            tokens = slice(first, min(first + chunk, num_tokens))
            for (a_TD, matrix), buffer in zip(self.operands, self.buffers, strict=True):
                product_into(buffer[: tokens.stop - first], a_TD[tokens], matrix)
            yield tokens

    def blocks(self, tile: slice) -> Iterator[_Block]:
        """The blocks of a chunk."""
        for first in range(0, tile.stop - tile.start, self.block):
            rows = slice(first, min(first + self.block, tile.stop - tile.start))
            student, teacher = (self._scaled(buffer[rows, : self.width]) for buffer in self.buffers)
            yield _Block(slice(tile.start + rows.start, tile.start + rows.stop), rows, student, teacher)

    def _scaled(self, logits_TV: Tensor) -> Tensor:
        return logits_TV.to(self.wide, copy=True).div_(self.temperature)


def _mixture(student_TV: Tensor, teacher_TV: Tensor, beta: float) -> Tensor:
    """log M of log-probabilities."""
    return torch.logaddexp(student_TV + math.log1p(-beta), teacher_TV + math.log(beta))


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """What these columns contribute to KL(p || q) of log-probabilities, (T,)."""
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)


def _terms(student_TV: Tensor, teacher_TV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Of log-probabilities: what these columns contribute to the divergence, and to sum_u S_u g_u."""
    if beta == 0:
        divergence_T = _kl(teacher_TV, student_TV)
        return divergence_T, torch.zeros_like(divergence_T)
    if beta == 1:
        divergence_T = _kl(student_TV, teacher_TV)
        return divergence_T, divergence_T
    mixture_TV = _mixture(student_TV, teacher_TV, beta)
    slope_T = (1 - beta) * _kl(student_TV, mixture_TV)
    return beta * _kl(teacher_TV, mixture_TV) + slope_T, slope_T


def _logit_gradients(student_TV: Tensor, teacher_TV: Tensor, slope_T1: Tensor, beta: float) -> Tensor:
    """The gradient of the divergence by the scaled logits of the student, from log-probabilities, which it overwrites."""
    if beta == 0:
        return student_TV.exp_().sub_(teacher_TV.exp_())
    if beta == 1:
        gains_TV = torch.sub(student_TV, teacher_TV, out=teacher_TV)
    else:
        gains_TV = torch.sub(student_TV, _mixture(student_TV, teacher_TV, beta), out=teacher_TV).mul_(1 - beta)
    return gains_TV.sub_(slope_T1).mul_(student_TV.exp_())


@linear_divergence_p.def_impl
def _impl(x, head, y, other, **params):
    chunks = _Chunks.of(x, head, y, other, **params)
    divergence, agreement, lse, other_lse, slope = found = [chunks.empty() for _ in range(5)]
    for tile in chunks.tiles():
        for block in chunks.blocks(tile):
            agreement[block.tokens] = block.student_TV.argmax(1).eq(block.teacher_TV.argmax(1)).to(chunks.wide)
            for logits_TV, lse_T in ((block.student_TV, lse), (block.teacher_TV, other_lse)):
                lse_T[block.tokens] = logits_TV.logsumexp(1)
                logits_TV.sub_(lse_T[block.tokens, None])
            divergence[block.tokens], slope[block.tokens] = _terms(block.student_TV, block.teacher_TV, params["beta"])
    return tuple(value.view(x.shape[:-1]) for value in found)


@linear_divergence_stats_p.def_impl
def _impl_stats(x, head, y, other, **params):
    chunks = _Chunks.of(x, head, y, other, **params)
    lse, peak, best = found = [chunks.empty(2) for _ in range(3)]
    if not chunks.width:
        lse.fill_(-torch.inf), peak.fill_(-torch.inf), best.fill_(-torch.inf)
        return tuple(value.view(*x.shape[:-1], 2) for value in found)
    for tile in chunks.tiles():
        for block in chunks.blocks(tile):
            for model, logits_TV in enumerate((block.student_TV, block.teacher_TV)):
                lse[block.tokens, model] = logits_TV.logsumexp(1)
                highest, column = logits_TV.max(1)
                peak[block.tokens, model], best[block.tokens, model] = highest, -(column + chunks.start).to(chunks.wide)
    return tuple(value.view(*x.shape[:-1], 2) for value in found)


@linear_divergence_terms_p.def_impl
def _impl_terms(x, head, y, other, lse, other_lse, **params):
    chunks = _Chunks.of(x, head, y, other, **params)
    divergence, slope = chunks.empty(), chunks.empty()
    lse_T1, other_lse_T1 = lse.reshape(-1, 1), other_lse.reshape(-1, 1)
    for tile in chunks.tiles():
        for block in chunks.blocks(tile):
            student_TV = block.student_TV.sub_(lse_T1[block.tokens])
            teacher_TV = block.teacher_TV.sub_(other_lse_T1[block.tokens])
            divergence[block.tokens], slope[block.tokens] = _terms(student_TV, teacher_TV, params["beta"])
    return divergence.view(x.shape[:-1]), slope.view(x.shape[:-1])


@linear_divergence_p.def_vjp("x, head, y, other, lse, other_lse, slope, ddivergence -> dx, dhead")
def _vjp(x, head, y, other, lse, other_lse, slope, ddivergence, **params):
    dhead = torch.zeros(head.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return _pull_back(x, head, y, other, lse, other_lse, slope, ddivergence, params, dhead), dhead.to(head.dtype)


@linear_divergence_p.def_vjp_part("x, head, y, other, lse, other_lse, slope, ddivergence -> dx")
def linear_divergence_x_bwd_p(x, head, y, other, lse, other_lse, slope, ddivergence, **params):
    """The gradient of x alone, for a head that is frozen."""
    return _pull_back(x, head, y, other, lse, other_lse, slope, ddivergence, params)


def _pull_back(x, head, y, other, lse, other_lse, slope, ddivergence, params, dhead: Tensor | None = None) -> Tensor:
    """dx; the gradient of the head is added to `dhead`."""
    chunks = _Chunks.of(x, head, y, other, **params)
    dx_TD = torch.zeros(chunks.x_TD.shape, dtype=x.dtype, device=x.device)
    if ddivergence is None:
        return dx_TD.view(x.shape)
    lse_T1, other_lse_T1, slope_T1, dloss_T1 = (value.reshape(-1, 1) for value in (lse, other_lse, slope, ddivergence))
    for tile in chunks.tiles():
        dlogits = chunks.buffers[0][: tile.stop - tile.start]
        for block in chunks.blocks(tile):
            student_TV = block.student_TV.sub_(lse_T1[block.tokens])
            teacher_TV = block.teacher_TV.sub_(other_lse_T1[block.tokens])
            grads_TV = _logit_gradients(student_TV, teacher_TV, slope_T1[block.tokens], params["beta"])
            dlogits[block.rows, : chunks.width] = grads_TV.mul_(dloss_T1[block.tokens] / params["temperature"])
        dlogits[:, chunks.width :] = 0.0
        product_into(dx_TD[tile], dlogits, chunks.head.T)
        if dhead is not None and dhead.dtype == dlogits.dtype:
            add_product(dhead, chunks.x_TD[tile].T, dlogits)
        elif dhead is not None:
            dhead += chunks.x_TD[tile].T @ dlogits
    return dx_TD.view(x.shape)


@linear_divergence_p.def_formula
def _formula(x, head, y, other, *, beta, temperature, vocab_size, start, chunk):
    """All results from whole logits."""
    assert start == 0, "gradients are differentiated before columns are divided"
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    logits = [(a @ matrix)[..., :vocab_size].to(wide) / temperature for a, matrix in ((x, head), (y.detach(), other.detach()))]
    lse, other_lse = (values.logsumexp(-1) for values in logits)
    agreement = logits[0].argmax(-1).eq(logits[1].argmax(-1)).to(wide)
    student, teacher = (values.log_softmax(-1) for values in logits)
    divergence, slope = _terms(student, teacher, beta)
    return divergence, agreement, lse, other_lse, slope


@linear_divergence_p.def_sharded("v")
def _sharded(emit, x, head, y, other, **params):
    """Log-sum-exps and the likeliest tokens over all shards, then sums of what each shard contributes; logits are made twice."""
    aten, params = torch.ops.aten, params | {"start": emit.start}
    of_shard = emit(linear_divergence_stats_p, x, head, y, other, **params)
    lse, peak, best = (emit.getitem(of_shard, index) for index in range(3))
    highest = emit.all_reduce(emit(aten.stack.default, [lse, peak]), "max")
    top, all_peak = (emit(aten.select.int, highest, 0, index) for index in range(2))
    share = emit.all_reduce(emit(aten.exp.default, emit(aten.sub.Tensor, lse, top)), "sum")
    lse_2 = emit(aten.add.Tensor, emit(aten.log.default, share), top)
    elsewhere = emit(aten.lt.Tensor, peak, all_peak)
    best = emit.all_reduce(emit(aten.masked_fill.Scalar, best, elsewhere, -torch.inf), "max")
    lse, other_lse = (emit(aten.select.int, lse_2, -1, index) for index in range(2))
    same = emit(aten.eq.Tensor, *(emit(aten.select.int, best, -1, index) for index in range(2)))
    agreement = emit(aten._to_copy.default, same, dtype=_wide(x, y))
    terms = emit(linear_divergence_terms_p, x, head, y, other, lse, other_lse, **params)
    sums = emit.all_reduce(emit(aten.stack.default, [emit.getitem(terms, index) for index in range(2)]), "sum")
    divergence, slope = (emit(aten.select.int, sums, 0, index) for index in range(2))
    return divergence, agreement, lse, other_lse, slope


def _wide(x: Any, y: Any) -> torch.dtype:
    """The dtype of results, for nodes of a graph."""
    return torch.promote_types(torch.promote_types(x.meta["val"].dtype, y.meta["val"].dtype), torch.float32)


@linear_divergence_p.bwd.def_sharded("v")
def _sharded_bwd(emit, x, head, y, other, lse, other_lse, slope, ddivergence, **params):
    params |= {"start": emit.start}
    grads = emit(linear_divergence_p.bwd, x, head, y, other, lse, other_lse, slope, ddivergence, **params)
    return emit.pending(emit.getitem(grads, 0)), emit.getitem(grads, 1)


@linear_divergence_x_bwd_p.def_sharded("v")
def _sharded_x_bwd(emit, x, head, y, other, lse, other_lse, slope, ddivergence, **params):
    params |= {"start": emit.start}
    return emit.pending(
        emit(linear_divergence_x_bwd_p, x, head, y, other, lse, other_lse, slope, ddivergence, **params)
    )


def _cost(x, head, y, other, products: int, passes: int, wide_head: bool, chunk: int) -> Cost:
    """`products` with the head of the student, and one with the other's; `passes` of exponentials over both logits."""
    tokens, columns = x.numel() // x.shape[-1], head.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32).itemsize
    flops = 2 * columns * (products * x.numel() + y.numel())
    rows = min(chunk, tokens)
    logits_bytes = rows * columns * (x.element_size() + y.element_size())
    block_bytes = _VALUES_OF_BLOCK * min(rows * columns, max(_BLOCK, columns)) * wide
    head_bytes = 2 * head.numel() * 4 if wide_head and x.element_size() < 4 else 0
    return Cost(
        flops=flops,
        bytes=(2 if products > 1 else 1) * (x.nbytes + head.nbytes) + y.nbytes + other.nbytes,
        workspace=logits_bytes + block_bytes + head_bytes + 64 * tokens + _copies(head, other),
        transcendentals=passes * 2 * tokens * columns,
        matmul=MatmulShape(batch=(products + 1) * ceil(tokens / chunk), m=rows, n=columns, k=head.shape[0]),
    )


def _copies(*matrices: Tensor) -> int:
    """Bytes of matrices that are made contiguous."""
    return sum(0 if matrix.is_contiguous() else matrix.nbytes for matrix in matrices)


linear_divergence_p.def_cost(lambda x, head, y, other, *, chunk, **_: _cost(x, head, y, other, 1, 2, False, chunk))
linear_divergence_stats_p.def_cost(lambda x, head, y, other, *, chunk, **_: _cost(x, head, y, other, 1, 1, False, chunk))
linear_divergence_terms_p.def_cost(lambda x, head, y, other, *__, chunk, **_: _cost(x, head, y, other, 1, 2, False, chunk))
linear_divergence_p.bwd.def_cost(lambda x, head, y, other, *__, chunk, **_: _cost(x, head, y, other, 3, 2, True, chunk))
linear_divergence_x_bwd_p.def_cost(lambda x, head, y, other, *__, chunk, **_: _cost(x, head, y, other, 2, 2, False, chunk))
linear_divergence_p.def_sharding("... d, d v, ... e, e v -> ..., ..., ..., ..., ...", need_replication="d e v")
linear_divergence_stats_p.def_sharding("... d, d v, ... e, e v -> ... _, ... _, ... _", need_replication="d e v")
linear_divergence_terms_p.def_sharding("... d, d v, ... e, e v, ..., ... -> ..., ...", need_replication="d e v")
_BACKWARD = "... d, d v, ... e, e v, ..., ..., ..., ... -> ... d"
linear_divergence_p.bwd.def_sharding(f"{_BACKWARD}, d v", need_replication="d e")
linear_divergence_x_bwd_p.def_sharding(_BACKWARD, need_replication="d e")
for _primitive in (
    *(linear_divergence_p, linear_divergence_stats_p, linear_divergence_terms_p),
    *(linear_divergence_p.bwd, linear_divergence_x_bwd_p),
):
    _primitive.def_batching_leading()
