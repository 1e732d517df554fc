"""Cross-entropy per token: loss = lse(logits) - logits[label], by blocks of rows, also with a sharded vocabulary.

The sharded form exchanges a maximum and one sum per token instead of the logits (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3).
"""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._primitive import Cost, Primitive

__all__ = ["check_labels", "combine_shards", "cross_entropy", "masked_loss", "row_gradients", "row_statistics", "weighted_sum"]

_PARAMS = {"ignore_index": "int", "vocab_size": "int", "start": "int"}
cross_entropy_p = Primitive("cross_entropy", "logits, labels -> loss, lse", **_PARAMS)
cross_entropy_stats_p = Primitive("cross_entropy_stats", "logits, labels -> lse, target", **_PARAMS)

BLOCK = 1 << 19
"""Elements of a block of rows: few enough to stay in a cache between two passes, enough to hide what a call costs."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`(sum, weight)`: the weighted sum of `-log softmax(logits)[label]` in nats, and the sum of the weights.

    `logits` (..., V), `labels` and `token_weights` (...); tokens whose label is `ignore_index` weigh 0, the others 1 or their
    `token_weights`. Columns from `vocab_size` on are padding: they count as -inf. Both results are scalars, float32 or wider;
    a label outside [0, vocab_size) that is not `ignore_index` makes the sum NaN. The weights get no gradient through `weight`.
    Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    loss, _ = cross_entropy_p.bind(logits, labels, ignore_index=ignore_index, vocab_size=vocab_size, start=0)
    return weighted_sum(loss, labels, token_weights, ignore_index)


def weighted_sum(loss: Tensor, labels: Tensor, token_weights: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """`(sum(loss * w), sum(w))` where w is `token_weights`, or 1, and 0 for ignored tokens. Raises ShapeError."""
    if token_weights is None:
        return loss.sum(), (labels != ignore_index).to(loss.dtype).sum()
    if token_weights.shape != labels.shape:
        shapes = f"token_weights {tuple(token_weights.shape)} and labels {tuple(labels.shape)}"
        raise ShapeError(f"cross entropy: {shapes} must have the same shape")
    weights = token_weights.to(loss.dtype).masked_fill(labels == ignore_index, 0.0)
    return (loss * weights).sum(), weights.sum()


def check_labels(name: str, shape: tuple[int, ...], dtype: torch.dtype, labels: Tensor, vocab_size: int) -> None:
    """Raise unless logits of `shape` and `dtype` and `labels` fit each other."""
    if not shape or not shape[-1] or tuple(labels.shape) != tuple(shape[:-1]):
        raise ShapeError(f"{name}: logits {tuple(shape)}, labels {tuple(labels.shape)}: they must be (..., V) and (...), V > 0")
    if not dtype.is_floating_point or labels.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: logits are {dtype}, labels {labels.dtype}; they must be floating, and int32 or int64")
    if vocab_size < 1:
        raise ConfigError(f"{name}: vocab_size is {vocab_size}, must be positive")


@cross_entropy_stats_p.def_abstract
@cross_entropy_p.def_abstract
def _abstract(logits, labels, *, ignore_index, vocab_size, start):
    check_labels("cross_entropy", logits.shape, logits.dtype, labels, vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss, lse = (torch.empty(labels.shape, dtype=wide, device=logits.device) for _ in range(2))
    return loss, lse


def _blocks(num_rows: int, num_columns: int) -> list[slice]:
    size = max(1, BLOCK // num_columns)
    return [slice(first, first + size) for first in range(0, num_rows, size)]


def row_statistics(
    logits_TV: Tensor, labels_T: Tensor, *, ignore_index: int, vocab_size: int, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`(lse, target, loss)` of each row over the columns [start, start + V) that are below `vocab_size`, float32 or wider.

    `target` is the label's logit: 0 if these columns do not hold it or it is ignored, NaN if the label is invalid.
    """
    width = min(max(vocab_size - start, 0), logits_TV.shape[1])
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    if not width:
        target = masked_target(logits_TV.new_zeros(labels_T.shape, dtype=wide), labels_T, ignore_index, vocab_size)
        return torch.full_like(target, -torch.inf), target, target.clone()
    local = labels_T.long() - start
    column = local.clamp(0, width - 1).unsqueeze(1)
    logp = torch.empty(labels_T.shape, dtype=wide, device=logits_TV.device)
    for rows in _blocks(*logits_TV.shape):
        # torch's softmax kernels exponentiate twice as fast as exp() does
        torch.gather(torch.log_softmax(logits_TV[rows, :width].to(wide), 1), 1, column[rows], out=logp[rows].unsqueeze(1))
    target = logits_TV.gather(1, column).squeeze(1).to(wide)
    lse = target - logp
    unlikely = ~(logp > -32.0)  # there the difference of two large numbers would lose digits, or be inf - inf
    if bool(unlikely.any()):
        lse[unlikely] = torch.logsumexp(logits_TV[unlikely, :width].to(wide), 1)
    target = masked_target(target.masked_fill_((local < 0) | (local >= width), 0.0), labels_T, ignore_index, vocab_size)
    return lse, target, masked_loss(-logp, labels_T, ignore_index).masked_fill_(target.isnan(), torch.nan)


def masked_target(target: Tensor, labels: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    """`target` with 0 for ignored tokens and NaN for labels that do not exist."""
    ignored = labels == ignore_index
    target.masked_fill_(((labels < 0) | (labels >= vocab_size)) & ~ignored, torch.nan)
    return target.masked_fill_(ignored, 0.0)


def masked_loss(loss: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """`loss` with 0 for ignored tokens."""
    return loss.masked_fill(labels == ignore_index, 0.0)


def row_gradients(
    logits_TV: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    dlse_T: Tensor | None,
    *,
    ignore_index: int,
    vocab_size: int,
    start: int,
    out: Tensor,
) -> Tensor:
    """`softmax * (dloss + dlse) - onehot * dloss`, written to `out`, which may be `logits_TV`; ignored tokens have dloss 0."""
    wide, num_columns = lse_T.dtype, logits_TV.shape[1]
    width = min(max(vocab_size - start, 0), num_columns)
    dloss_T = dloss_T.masked_fill(labels_T == ignore_index, 0.0)
    scale_T1 = (dloss_T if dlse_T is None else dloss_T + dlse_T).unsqueeze(1)
    whole = start == 0 and vocab_size <= num_columns  # then the rows' own softmax is the softmax, and faster than exp()
    direct = whole and width == num_columns
    for rows in _blocks(*logits_TV.shape):
        if direct:
            torch.softmax(logits_TV[rows], 1, out=out[rows])
            out[rows].mul_(scale_T1[rows])
            continue
        block = logits_TV[rows, :width].to(wide)
        p = torch.softmax(block, 1) if whole else torch.sub(block, lse_T[rows].unsqueeze(1)).exp_()
        torch.mul(p, scale_T1[rows], out=out[rows, :width])
    if width < num_columns:
        out[:, width:] = 0.0
    local = labels_T.long() - start
    onehot = dloss_T.masked_fill((local < 0) | (local >= width), 0.0).neg_().to(out.dtype)
    return out.scatter_add_(1, local.clamp(0, num_columns - 1).unsqueeze(1), onehot.unsqueeze(1))


@cross_entropy_p.def_impl
def _impl(logits: Tensor, labels: Tensor, *, ignore_index: int, vocab_size: int, start: int) -> tuple[Tensor, Tensor]:
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.flatten()
    lse, target, loss = row_statistics(rows, flat, ignore_index=ignore_index, vocab_size=vocab_size, start=start)
    if start or vocab_size > logits.shape[-1]:  # the rows hold a part of the columns: the label's may not be among them
        loss = masked_loss(lse - target, flat, ignore_index)
    return loss.view(labels.shape), lse.view(labels.shape)


@cross_entropy_stats_p.def_impl
def _impl_stats(logits: Tensor, labels: Tensor, *, ignore_index: int, vocab_size: int, start: int) -> tuple[Tensor, Tensor]:
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.flatten()
    lse, target, _ = row_statistics(rows, flat, ignore_index=ignore_index, vocab_size=vocab_size, start=start)
    return lse.view(labels.shape), target.view(labels.shape)


@cross_entropy_p.def_vjp("logits, labels, lse, dloss, dlse -> dlogits")
def _vjp(logits, labels, lse, dloss, dlse, *, ignore_index, vocab_size, start):
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_gradients(
        logits.reshape(-1, logits.shape[-1]),
        labels.flatten(),
        lse.flatten(),
        dloss.flatten(),
        None if dlse is None else dlse.flatten(),
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        start=start,
        out=dlogits.view(-1, logits.shape[-1]),
    )
    return dlogits


def combine_shards(emit, statistics, labels, ignore_index):
    """`(loss, lse)` from each shard's `(lse, target)`: one maximum, then one sum of both parts."""
    aten = torch.ops.aten
    lse, target = emit.getitem(statistics, 0), emit.getitem(statistics, 1)
    peak = emit.all_reduce(lse, "max")
    share = emit(aten.exp.default, emit(aten.sub.Tensor, lse, peak))
    parts = emit.all_reduce(emit(aten.stack.default, [share, target]), "sum")
    lse = emit(aten.add.Tensor, emit(aten.log.default, emit(aten.select.int, parts, 0, 0)), peak)
    loss = emit(aten.sub.Tensor, lse, emit(aten.select.int, parts, 0, 1))
    return emit(aten.masked_fill.Scalar, loss, emit(aten.eq.Scalar, labels, ignore_index), 0.0), lse


@cross_entropy_p.def_sharded("v")
def _sharded(emit, logits, labels, *, ignore_index, vocab_size, start):
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": emit.start}
    return combine_shards(emit, emit(cross_entropy_stats_p, logits, labels, **params), labels, ignore_index)


@cross_entropy_p.bwd.def_sharded("v")
def _sharded_bwd(emit, logits, labels, lse, dloss, dlse, *, ignore_index, vocab_size, start):
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": emit.start}
    return emit(cross_entropy_p.bwd, logits, labels, lse, dloss, dlse, **params)


for _primitive in (cross_entropy_p, cross_entropy_stats_p):
    _primitive.def_sharding("... v, ... -> ..., ...", need_replication="v")
    _primitive.def_batching_leading()
    _primitive.def_cost(
        lambda logits, labels, **_: Cost(flops=4 * logits.numel(), bytes=logits.nbytes, workspace=_workspace(logits, labels))
    )
cross_entropy_p.bwd.def_sharding("... v, ..., ..., ..., ... -> ... v")
cross_entropy_p.bwd.def_batching_leading()
cross_entropy_p.bwd.def_cost(
    lambda logits, labels, *_, **__: Cost(flops=5 * logits.numel(), bytes=2 * logits.nbytes, workspace=_workspace(logits, labels))
)


def _workspace(logits: Tensor, labels: Tensor) -> int:
    """Two blocks in the wide dtype, and a few numbers per token."""
    return 2 * max(BLOCK, logits.shape[-1]) * max(4, logits.element_size()) + 40 * labels.numel()
