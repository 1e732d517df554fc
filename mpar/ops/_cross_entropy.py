"""Cross-entropy per token: loss = lse(logits) - logits[label], computed by blocks of rows. The vocabulary may be sharded.

Ranks that share a vocabulary do not gather logits: they reduce a maximum and then sums for each token (Shoeybi et al. 2019,
arXiv:1909.08053, sec. 3). Label smoothing mixes the label with the uniform distribution (Szegedy et al. 2016, arXiv:1512.00567,
sec. 7); its target is a sum over columns, so that the targets of shards can be added too.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._rows import softmax_rows, softmax_statistics_rows, softmax_takes
from mpar.ops.primitive import Cost, Primitive

__all__ = [
    "add_z_loss",
    "check_labels",
    "combine_shards",
    "cross_entropy",
    "formula",
    "row_gradients",
    "row_losses",
    "row_statistics",
    "token_losses",
    "weighted_sum",
]

_PARAMS = {"ignore_index": "int", "vocab_size": "int", "start": "int", "label_smoothing": "float"}
cross_entropy_p = Primitive("cross_entropy", "logits, labels -> loss, lse", **_PARAMS)
cross_entropy_stats_p = Primitive("cross_entropy_stats", "logits, labels -> lse, target", **_PARAMS)
cross_entropy_grad_p = Primitive("cross_entropy_grad", "logits, labels, dloss -> loss, lse, dlogits", **_PARAMS)
"""Losses and gradient in one op, which exponentiates the logits only once and writes the gradient over them: for known cotangents
`dloss`, and no cotangents of `lse`."""
cross_entropy_grad_p.mutates = ("logits",)

BLOCK = 1 << 19
"""Elements of a block of rows: few enough to stay in a cache while they are read twice, enough to hide the cost of a call."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`(sum, weight)`: the weighted sum of `-log softmax(logits)[label]` in nats, and the sum of the weights.

    `logits` (..., V), `labels` and `token_weights` (...); tokens whose label is `ignore_index` weigh 0, the others 1 or their
    `token_weights`. Columns from `vocab_size` on are padding: they count as -inf. Both results are scalars, float32 or wider;
    a label outside [0, vocab_size) that is not `ignore_index` makes the sum NaN. The weights get no gradient through `weight`.
    `label_smoothing` is the share of the target that is spread evenly over the vocabulary, as in torch; with it, a logit of -inf
    makes the loss infinite. For every token, `z_loss` times the square of its log-sum-exp is added (Chowdhery et al. 2022,
    arXiv:2204.02311, sec. 5). Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": 0, "label_smoothing": label_smoothing}
    loss, lse = cross_entropy_p.bind(logits, labels, **params)
    return weighted_sum(add_z_loss(loss, lse, labels, ignore_index, z_loss), labels, token_weights, ignore_index)


def token_losses(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, vocab_size: int | None = None) -> Tensor:
    """`-log softmax(logits)[label]` of each token in nats, float32 or wider; 0 where the label is `ignore_index`.

    `logits` (..., V) and `labels` (...), as `cross_entropy` takes them. Raises ShapeError, DtypeError or ConfigError.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": 0, "label_smoothing": 0.0}
    return cross_entropy_p.bind(logits, labels, **params)[0]


def add_z_loss(loss: Tensor, lse: Tensor, labels: Tensor, ignore_index: int, z_loss: float) -> Tensor:
    """`loss + z_loss * lse^2`; the loss of ignored tokens stays 0. Raises ConfigError for a negative or infinite `z_loss`."""
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ConfigError(f"cross entropy: z_loss is {z_loss}, must be a finite number and not negative")
    return loss + z_loss * masked_loss(lse, labels, ignore_index).square() if z_loss else loss


def weighted_sum(loss: Tensor, labels: Tensor, token_weights: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """`(sum(loss * w), sum(w))`, where w is 0 for ignored tokens, and else `token_weights` or 1. Raises ShapeError."""
    if token_weights is None:
        return loss.sum(), (labels != ignore_index).to(loss.dtype).sum()
    if token_weights.shape != labels.shape:
        shapes = f"token_weights {tuple(token_weights.shape)} and labels {tuple(labels.shape)}"
        raise ShapeError(f"cross entropy: {shapes} must have the same shape")
    weights = token_weights.to(loss.dtype).masked_fill(labels == ignore_index, 0.0)
    return (loss * weights).sum(), weights.sum()


def check_labels(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, labels: Tensor, vocab_size: int, label_smoothing: float
) -> None:
    """Raise unless `labels` fit logits of `shape` and `dtype`, and the parameters are in their bounds."""
    if not shape or not shape[-1] or tuple(labels.shape) != tuple(shape[:-1]):
        raise ShapeError(f"{name}: logits {tuple(shape)}, labels {tuple(labels.shape)}: they must be (..., V) and (...), V > 0")
    if not dtype.is_floating_point or labels.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: logits are {dtype}, labels {labels.dtype}; they must be floating, and int32 or int64")
    if vocab_size < 1:
        raise ConfigError(f"{name}: vocab_size is {vocab_size}, must be positive")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"{name}: label_smoothing is {label_smoothing}, must be a share: at least 0, at most 1")


@cross_entropy_stats_p.def_abstract
@cross_entropy_p.def_abstract
def _abstract(logits, labels, *, ignore_index, vocab_size, start, label_smoothing):
    check_labels("cross_entropy", logits.shape, logits.dtype, labels, vocab_size, label_smoothing)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss, lse = (torch.empty(labels.shape, dtype=wide, device=logits.device) for _ in range(2))
    return loss, lse


@cross_entropy_grad_p.def_abstract
def _abstract_grad(logits, labels, dloss, **params):
    loss, lse = _abstract(logits, labels, **params)
    if dloss.shape != labels.shape:
        shapes = f"dloss {tuple(dloss.shape)} and labels {tuple(labels.shape)}"
        raise ShapeError(f"cross_entropy_grad: {shapes} must have the same shape")
    if not logits.is_contiguous():
        strides = f"logits {tuple(logits.shape)} have the strides {logits.stride()}"
        raise ShapeError(f"cross_entropy_grad: {strides}: only contiguous ones can be overwritten; use cross_entropy")
    return loss, lse, torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _blocks(num_rows: int, num_columns: int) -> list[slice]:
    size = max(1, BLOCK // num_columns)
    return [slice(first, first + size) for first in range(0, num_rows, size)]


def row_statistics(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int,
    vocab_size: int,
    start: int,
    label_smoothing: float,
    p_TV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(lse, target, loss)` of each row, float32 or wider, from the columns [start, start + V) that are below `vocab_size`.

    `target` is what these columns contribute to the logit of the target: the logit of the label, or 0 if it is in another column;
    with label smoothing also a share of all logits. It is 0 if the label is ignored, NaN if it is invalid. `loss` is valid only
    if the columns are all of the vocabulary. The softmax of the columns is written to `p_TV`, if it is given without smoothing.
    """
    width = min(max(vocab_size - start, 0), logits_TV.shape[1])
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    if not width:
        target = masked_target(logits_TV.new_zeros(labels_T.shape, dtype=wide), labels_T, ignore_index, vocab_size)
        return torch.full_like(target, -torch.inf), target, target.clone()
    local = labels_T.long() - start
    column_T = local.clamp(0, width - 1)
    found = None if label_smoothing or p_TV is not None else softmax_statistics_rows(logits_TV[:, :width], column_T)
    if found is None:
        lse, target, logp, *sums = _statistics_by_torch(logits_TV, column_T, width, label_smoothing, p_TV)
    else:
        lse, target, logp = found
    target = target.masked_fill_((local < 0) | (local >= width), 0.0)
    if label_smoothing:
        share = label_smoothing / vocab_size
        target = (1 - label_smoothing) * target + share * sums[0]
        logp = (1 - label_smoothing) * logp + share * sums[1]
    target = masked_target(target, labels_T, ignore_index, vocab_size)
    return lse, target, masked_loss(-logp, labels_T, ignore_index).masked_fill_(target.isnan(), torch.nan)


def _statistics_by_torch(
    logits_TV: Tensor, column_T: Tensor, width: int, label_smoothing: float, p_TV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first `width` columns of each row: the lse, the logit of `column_T` and the log of its probability, and, with label
    smoothing, the sum of the logits and that of the logs of all probabilities."""
    wide, column = torch.promote_types(logits_TV.dtype, torch.float32), column_T.unsqueeze(1)
    logp, sum_x, sum_logp = (torch.empty(column_T.shape, dtype=wide, device=logits_TV.device) for _ in range(3))
    for rows in _blocks(*logits_TV.shape):
        block = logits_TV[rows, :width].to(wide)
        # torch's softmax kernels exponentiate twice as fast as exp() does
        if label_smoothing:
            logp_block = torch.log_softmax(block, 1)
            torch.gather(logp_block, 1, column[rows], out=logp[rows].unsqueeze(1))
            torch.sum(block, 1, out=sum_x[rows])
            torch.sum(logp_block, 1, out=sum_logp[rows])
        else:
            p_block = torch.softmax(block, 1, out=None if p_TV is None else p_TV[rows])
            torch.gather(p_block, 1, column[rows], out=logp[rows].unsqueeze(1)).log_()
    target = logits_TV.gather(1, column).squeeze(1).to(wide)
    lse = target - logp
    unlikely = ~(logp > -32.0)  # for these labels target - logp would lose digits, or be inf - inf
    if bool(unlikely.any()):
        few = logits_TV[unlikely, :width].to(wide)
        lse[unlikely] = torch.logsumexp(few, 1)
        logp[unlikely] = torch.log_softmax(few, 1).gather(1, column[unlikely]).squeeze(1)  # p may be too small for its dtype
    return lse, target, logp, sum_x, sum_logp


def row_losses(logits_TV: Tensor, labels_T: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    """`(loss, lse)` of each row; the parameters are those of `row_statistics`."""
    lse, target, loss = row_statistics(logits_TV, labels_T, **params)
    if params["start"] or params["vocab_size"] > logits_TV.shape[1]:  # not all columns: the one of the label may be missing
        loss = masked_loss(lse - target, labels_T, params["ignore_index"])
    return loss, lse


def masked_target(target: Tensor, labels: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    """`target`, overwritten with 0 for ignored tokens and with NaN for labels that do not exist."""
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
    label_smoothing: float,
    out: Tensor,
    p_TV: Tensor | None = None,
) -> Tensor:
    """`softmax * (dloss + dlse) - target * dloss`, written to `out`, which may be `logits_TV`; ignored tokens have dloss 0.

    `p_TV` is the softmax, if it is known already: as `row_statistics` writes it.

    The target is one-hot. With label smoothing e it is 1 - e at the label, plus e / vocab_size in every column.
    """
    wide, num_columns = lse_T.dtype, logits_TV.shape[1]
    width = min(max(vocab_size - start, 0), num_columns)
    dloss_T = dloss_T.masked_fill(labels_T == ignore_index, 0.0)
    scale_T1 = (dloss_T if dlse_T is None else dloss_T + dlse_T).unsqueeze(1)
    all_columns = start == 0 and vocab_size <= num_columns  # then torch.softmax can be used, which is faster than exp()
    direct = _is_direct(num_columns, start, vocab_size, label_smoothing)
    by_kernel = not label_smoothing and softmax_rows(logits_TV[:, :width], lse_T, scale_T1.flatten(), out[:, :width]) is not None
    share_T1 = (dloss_T * (label_smoothing / vocab_size)).unsqueeze(1)
    for rows in [] if by_kernel else _blocks(*logits_TV.shape):
        if p_TV is not None:
            torch.mul(p_TV[rows], scale_T1[rows], out=out[rows])
            continue
        if direct:
            torch.softmax(logits_TV[rows], 1, out=out[rows])
            out[rows].mul_(scale_T1[rows])
            continue
        block = logits_TV[rows, :width].to(wide)
        p = torch.softmax(block, 1) if all_columns else torch.sub(block, lse_T[rows].unsqueeze(1)).exp_()
        if label_smoothing:
            out[rows, :width] = p.mul_(scale_T1[rows]).sub_(share_T1[rows])
        else:
            torch.mul(p, scale_T1[rows], out=out[rows, :width])
    if width < num_columns:
        out[:, width:] = 0.0
    local = labels_T.long() - start
    onehot = dloss_T.masked_fill((local < 0) | (local >= width), 0.0).mul_(label_smoothing - 1).to(out.dtype)
    return out.scatter_add_(1, local.clamp(0, num_columns - 1).unsqueeze(1), onehot.unsqueeze(1))


def _is_direct(num_columns: int, start: int, vocab_size: int, label_smoothing: float) -> bool:
    """Whether the gradient of a row is its softmax, scaled, but for the column of the label."""
    return start == 0 and vocab_size == num_columns and not label_smoothing


@cross_entropy_grad_p.def_impl
def _impl_grad(logits, labels, dloss, **params):
    logits_TV, labels_T, dloss_T = logits.view(-1, logits.shape[-1]), labels.flatten(), dloss.flatten()
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss_T, lse_T = (torch.empty(labels_T.shape, dtype=wide, device=logits.device) for _ in range(2))
    others = {key: value for key, value in params.items() if key != "ignore_index"}
    shares = logits.dtype == wide and _is_direct(logits.shape[-1], **others) and not softmax_takes(logits_TV)
    blocks = _blocks(*logits_TV.shape)
    memory_TV = torch.empty_like(logits_TV[blocks[0]]) if shares and blocks else None
    for rows in blocks:
        block_TV = logits_TV[rows]
        p_TV = None if memory_TV is None else memory_TV[: block_TV.shape[0]]
        loss_T[rows], lse_T[rows] = row_losses(block_TV, labels_T[rows], **params, p_TV=p_TV)
        row_gradients(block_TV, labels_T[rows], lse_T[rows], dloss_T[rows], None, **params, out=block_TV, p_TV=p_TV)
    return loss_T.view(labels.shape), lse_T.view(labels.shape), logits


@cross_entropy_p.def_impl
def _impl(logits: Tensor, labels: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    loss, lse = row_losses(logits.reshape(-1, logits.shape[-1]), labels.flatten(), **params)
    return loss.view(labels.shape), lse.view(labels.shape)


@cross_entropy_stats_p.def_impl
def _impl_stats(logits: Tensor, labels: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    lse, target, _ = row_statistics(logits.reshape(-1, logits.shape[-1]), labels.flatten(), **params)
    return lse.view(labels.shape), target.view(labels.shape)


@cross_entropy_p.def_vjp("logits, labels, lse, dloss, dlse -> dlogits")
def _vjp(logits, labels, lse, dloss, dlse, **params):
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_gradients(
        logits.reshape(-1, logits.shape[-1]),
        labels.flatten(),
        lse.flatten(),
        dloss.flatten(),
        None if dlse is None else dlse.flatten(),
        **params,
        out=dlogits.view(-1, logits.shape[-1]),
    )
    return dlogits


@cross_entropy_p.def_formula
def formula(logits, labels, *, ignore_index, vocab_size, start, label_smoothing):
    """`(loss, lse)` of every token, where all columns are there."""
    assert start == 0, "gradients are differentiated before columns are divided"
    wide = logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    lse, ignored = wide.logsumexp(-1), labels == ignore_index
    target = wide.gather(-1, labels.long().clamp(0, vocab_size - 1).unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        target = (1 - label_smoothing) * target + label_smoothing / vocab_size * wide.sum(-1)
    target = target.masked_fill(((labels < 0) | (labels >= vocab_size)) & ~ignored, torch.nan)
    return (lse - target).masked_fill(ignored, 0.0), lse


def combine_shards(emit, statistics, labels, ignore_index):
    """`(loss, lse)` from the `(lse, target)` of each shard: an all_reduce of a maximum, then one of two sums."""
    aten = torch.ops.aten
    lse, target = emit.getitem(statistics, 0), emit.getitem(statistics, 1)
    peak = emit.all_reduce(lse, "max")
    share = emit(aten.exp.default, emit(aten.sub.Tensor, lse, peak))
    sums = emit.all_reduce(emit(aten.stack.default, [share, target]), "sum")
    lse = emit(aten.add.Tensor, emit(aten.log.default, emit(aten.select.int, sums, 0, 0)), peak)
    loss = emit(aten.sub.Tensor, lse, emit(aten.select.int, sums, 0, 1))
    return emit(aten.masked_fill.Scalar, loss, emit(aten.eq.Scalar, labels, ignore_index), 0.0), lse


@cross_entropy_p.def_sharded("v")
def _sharded(emit, logits, labels, **params):
    params |= {"start": emit.start}
    return combine_shards(emit, emit(cross_entropy_stats_p, logits, labels, **params), labels, params["ignore_index"])


@cross_entropy_p.bwd.def_sharded("v")
def _sharded_bwd(emit, logits, labels, lse, dloss, dlse, **params):
    return emit(cross_entropy_p.bwd, logits, labels, lse, dloss, dlse, **params | {"start": emit.start})


for _primitive in (cross_entropy_p, cross_entropy_stats_p):
    _primitive.asks_host = True
    _primitive.def_sharding("... v, ... -> ..., ...", need_replication="v")
    _primitive.def_batching_leading()
    _primitive.def_cost(lambda logits, labels, **_: _cost(logits, labels, flops=4, passes=1))
cross_entropy_grad_p.asks_host = True
cross_entropy_grad_p.def_sharding("... v, ..., ... -> ..., ..., ... v", need_replication="v")
cross_entropy_grad_p.def_batching_leading()
cross_entropy_grad_p.def_cost(lambda logits, labels, dloss, **_: _cost(logits, labels, flops=7, passes=2))
cross_entropy_p.bwd.def_sharding("... v, ..., ..., ..., ... -> ... v")
cross_entropy_p.bwd.def_batching_leading()
cross_entropy_p.bwd.def_cost(lambda logits, labels, *_, **__: _cost(logits, labels, flops=5, passes=2))


def _cost(logits: Tensor, labels: Tensor, *, flops: int, passes: int) -> Cost:
    """So many FLOPs and one exponential for each logit. Workspace: two blocks in the wide dtype, a few numbers per token."""
    n, workspace = logits.numel(), 2 * max(BLOCK, logits.shape[-1]) * max(4, logits.element_size()) + 40 * labels.numel()
    return Cost(flops=flops * n, bytes=passes * logits.nbytes, workspace=workspace, transcendentals=n)
