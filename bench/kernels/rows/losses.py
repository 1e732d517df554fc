"""Cross-entropy of logits, of one shard of a vocabulary, and of a head that makes the logits."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, extra_memory, of_copy, times
from bench.kernels.rows._liger import NOT_INSTALLED, liger
from mpar.kernels import implementation
from mpar.testing import TOLERANCES
from tools.kernel_shapes import CROSS_ENTROPY, CROSS_ENTROPY_SHARD, HEAD_LOSS, HEAD_LOSS_LONG

__all__ = ["ROWS"]

CHECKED = 32
"""Rows of dlogits or dx, and columns of dhead, that are compared."""
CHUNK = 256
"""How many tokens the float64 reference computes at a time."""
IGNORE = -100
LOGITS = TOLERANCES[torch.bfloat16]
"""Tolerance of losses in float32 where the head's logits are rounded to bfloat16, which shows in them."""


def full(setting: Setting, *, T: int, V: int) -> Built:
    """Mean loss and gradient of the logits, which are read twice and written once."""
    logits, labels = setting.normal(T, V), setting.integers(V, T)
    params = {"ignore_index": IGNORE, "vocab_size": V, "start": 0, "label_smoothing": 0.0}
    dloss = torch.full((T,), 1 / T, device=setting.device)

    def ours() -> tuple[Tensor, Tensor]:
        loss, lse = implementation("cross_entropy", "triton")(logits, labels, **params)
        return loss.mean(), implementation("cross_entropy_bwd", "triton")(logits, labels, lse, dloss, None, **params)

    leaf = logits.clone().requires_grad_()
    compiled, fused = setting.compiled(F.cross_entropy), liger("transformers", "LigerCrossEntropyLoss")

    def autograd(loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        loss = loss_of(leaf, labels)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: autograd(F.cross_entropy), _mean_and_rows),
        "torch.compile": Variant(lambda: autograd(compiled), _mean_and_rows),
        "liger": NOT_INSTALLED,
    }
    if fused is not None:  # it overwrites the logits with their gradient
        own = logits.clone().requires_grad_()
        peers["liger"] = Variant(functools.partial(_in_place, fused(), own, labels), _mean_and_rows)
    return Built(Variant(ours, _mean_and_rows), peers, lambda: _reference(logits, labels), 3 * logits.nbytes)


def shard(setting: Setting, *, T: int, V: int, shards: int) -> Built:
    """What one rank of a sharded vocabulary computes: its statistics, and its gradients from the log-sum-exp over all shards."""
    logits, labels = setting.normal(T, V), setting.integers(V * shards, T)
    start = V * (shards // 2)
    params = {"ignore_index": IGNORE, "vocab_size": V * shards, "start": start, "label_smoothing": 0.0}
    all_lse = torch.full((T,), 12.5, device=setting.device)
    dloss = torch.full((T,), 1 / T, device=setting.device)

    def ours() -> tuple[Tensor, ...]:
        statistics = implementation("cross_entropy_stats", "triton")(logits, labels, **params)
        return *statistics, implementation("cross_entropy_bwd", "triton")(logits, labels, all_lse, dloss, None, **params)

    operands = (logits, labels - start, all_lse, 1 / T)
    compiled = setting.compiled(_shard)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _shard(*operands), _each_rows),
        "torch.compile": Variant(lambda: compiled(*operands), _each_rows),
    }
    first = (logits[:CHECKED].double(), labels[:CHECKED] - start, all_lse[:CHECKED].double(), 1 / T)
    return Built(Variant(ours, _each_rows), peers, lambda: _shard(*first), 3 * logits.nbytes)


def head(setting: Setting, *, T: int, D: int, V: int) -> Built:
    """Mean loss and the gradients of x and of the head, from which the logits are computed."""
    x, head, labels = setting.normal(T, D), setting.normal(D, V, scale=D**-0.5), setting.integers(V, T)
    dloss = torch.full((T,), 1 / T, device=setting.device)
    params = {"ignore_index": IGNORE, "vocab_size": V, "start": 0, "label_smoothing": 0.0, "chunk": 1024}

    def ours() -> tuple[Tensor, ...]:
        loss, _, *grads = implementation("linear_cross_entropy_grad", "triton")(x, head, labels, dloss, **params)
        return loss.mean(), *grads

    leaves = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    compiled, fused = setting.compiled(_unfused), liger("transformers", "LigerFusedLinearCrossEntropyLoss")

    def autograd(loss_of: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = loss_of(*leaves, labels)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: autograd(_unfused), _head_slices),
        "torch.compile": Variant(lambda: autograd(compiled), _head_slices),
        "liger": NOT_INSTALLED,
    }
    if fused is not None:
        own = [leaves[0], head.T.contiguous().requires_grad_()]
        peers["liger"] = Variant(functools.partial(_liger_head, fused(), own, labels), _head_slices)
    moved = 2 * (x.nbytes + head.nbytes)
    return Built(
        Variant(ours, _head_slices), peers, lambda: _head_reference(x, head, labels), moved, 6 * T * D * V, tolerance=LOGITS
    )


def _in_place(loss_of: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = loss_of(logits, labels)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def _liger_head(loss_of: Callable[..., Tensor], leaves: list[Tensor], labels: Tensor) -> tuple[Tensor, ...]:
    x, head_VD = leaves
    loss = loss_of(head_VD, x, labels)
    dx, dhead_VD = torch.autograd.grad(loss, (x, head_VD))
    return loss.detach(), dx, dhead_VD.T


def _unfused(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x @ head).float(), labels)


def _shard(logits: Tensor, local: Tensor, all_lse: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.to(all_lse.dtype)
    here = (local >= 0) & (local < logits.shape[1])
    safe = local.clamp(0, logits.shape[1] - 1)[:, None]
    target = wide.gather(1, safe)[:, 0].masked_fill(~here, 0.0)
    hits = (torch.arange(logits.shape[1], device=local.device) == safe) & here[:, None]
    dlogits = ((wide - all_lse[:, None]).exp() - hits.to(wide.dtype)) * share
    return wide.logsumexp(1), target, dlogits.to(logits.dtype)


def _reference(logits: Tensor, labels: Tensor) -> list[Tensor]:
    total = sum(
        F.cross_entropy(logits[first : first + CHUNK].double(), labels[first : first + CHUNK], reduction="sum")
        for first in range(0, labels.numel(), CHUNK)
    )
    p = logits[:CHECKED].double().softmax(1)
    p[torch.arange(p.shape[0], device=p.device), labels[:CHECKED]] -= 1
    return [torch.as_tensor(total / labels.numel()).view(1), p / labels.numel()]


def _head_reference(x: Tensor, head: Tensor, labels: Tensor) -> list[Tensor]:
    wide, T = head.double(), labels.numel()
    total, dx, dhead = wide.new_zeros(1), None, wide.new_zeros(head.shape[0], min(CHECKED, head.shape[1]))
    for first in range(0, T, CHUNK):
        rows = x[first : first + CHUNK].double()
        log_p = F.log_softmax(rows @ wide, 1)
        here = labels[first : first + CHUNK, None]
        total -= log_p.gather(1, here).sum()
        dlogits = log_p.exp_().scatter_add_(1, here, log_p.new_full((1, 1), -1.0).expand(here.shape)).div_(T)
        dhead += rows.T @ dlogits[:, :CHECKED]
        dx = dlogits[:CHECKED] @ wide.T if dx is None else dx
    assert dx is not None
    return [total / T, dx, dhead]


def _mean_and_rows(result: Any) -> list[Tensor]:
    loss, dlogits = result
    return [loss.view(1), dlogits[:CHECKED]]


def _each_rows(results: Any) -> list[Tensor]:
    return [x[:CHECKED] for x in results]


def _head_slices(result: Any) -> list[Tensor]:
    loss, dx, dhead = result
    return [loss.view(1), dx[:CHECKED], dhead[:, :CHECKED]]


ROWS = [
    Row(13, "cross entropy fwd+bwd", full, CROSS_ENTROPY, [of_copy(0.85), times("liger", 1.3)]),
    Row(14, "cross entropy of a shard fwd+bwd", shard, CROSS_ENTROPY_SHARD, [of_copy(0.80)]),
    Row(
        15,
        "linear cross entropy fwd+bwd",
        head,
        HEAD_LOSS,
        [times("liger", 1.2), times("torch.compile", 0.92), extra_memory("torch.compile", 0.25)],
    ),
    Row(16, "linear cross entropy fwd+bwd", head, HEAD_LOSS_LONG, [times("liger", 1.1), times("torch.compile", 0.95)]),
]
