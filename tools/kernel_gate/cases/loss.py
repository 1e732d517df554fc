"""Cross-entropy over the vocabulary of Llama 3, an eighth of it, GPT-2's without padding, and fused with the head."""

import math

import torch
from torch import Tensor

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import CROSS_ENTROPY, CROSS_ENTROPY_SHARD, CROSS_ENTROPY_UNPADDED, HEAD_LOSS, Shape

WIDTHS = {"V128256": CROSS_ENTROPY, "V16032 of 8": CROSS_ENTROPY_SHARD, "V50257": CROSS_ENTROPY_UNPADDED}


def _params(shape: Shape, smoothing: float) -> dict[str, float]:
    vocab_size = shape.sizes["V"] * shape.sizes.get("shards", 1)
    return {"ignore_index": -100, "vocab_size": vocab_size, "start": _start(shape), "label_smoothing": smoothing}


def _start(shape: Shape) -> int:
    """The first column of the shard, which is the second one; 0 where the columns are the whole vocabulary."""
    return shape.sizes["V"] if "shards" in shape.sizes else 0


def _labels(make: Make, shape: Shape) -> Tensor:
    """Random labels. Where the columns are a shard, half of the labels are in it."""
    return make(shape.dims("T"), torch.int64) + max(_start(shape) - 50, 0)


def _forward(make: Make, shape: Shape, dtype: torch.dtype, smoothing: float) -> object:
    name = "cross_entropy_stats" if "shards" in shape.sizes else "cross_entropy"
    labels = _labels(make, shape)
    return implementation(name, "triton")(make(shape.dims("TV"), dtype), labels, **_params(shape, smoothing))


def _backward(make: Make, shape: Shape, dtype: torch.dtype, smoothing: float) -> object:
    labels, dloss = _labels(make, shape), make(shape.dims("T"), torch.float32)
    dlse = make(shape.dims("T"), torch.float32) if smoothing else None
    logits, params = make(shape.dims("TV"), dtype), _params(shape, smoothing)
    lse = _log_sum_exp(make, logits, shape.sizes.get("shards", 1))
    return implementation("cross_entropy_bwd", "triton")(logits, labels, lse, dloss, dlse, **params)


def _log_sum_exp(make: Make, logits: Tensor, num_shards: int) -> Tensor:
    """The log-sum-exp over the whole vocabulary, as if each of its other shards had the same sum of exponentials as this one."""
    if logits.is_meta:
        return make(logits.shape[:1], torch.float32)
    return logits.float().logsumexp(1) + math.log(num_shards)


def _fused(make: Make, shape: Shape, dtype: torch.dtype, smoothing: float) -> object:
    (T, V), D = shape.dims("TV"), HEAD_LOSS.sizes["D"]
    x, head = make((T, D), dtype), make((D, V), dtype)
    head.mul_(D**-0.5)  # so that logits have a standard deviation of 1
    labels, dloss = _labels(make, shape), make((T,), torch.float32)
    params = _params(shape, smoothing) | {"chunk": T}
    return implementation("linear_cross_entropy_grad", "triton")(x, head, labels, dloss, **params)


def _case(kernel: str, run, width: str, dtype: torch.dtype, smoothing: float = 0.0) -> Case:
    name = " ".join((kernel, width, str(dtype).removeprefix("torch."), *(["smoothed"] if smoothing else [])))
    return Case(name, (kernel,), lambda make: run(make, WIDTHS[width], dtype, smoothing))


CASES = [
    _case(kernel, run, width, dtype, smoothing)
    for kernel, run in (("cross_entropy_fwd", _forward), ("cross_entropy_bwd", _backward), ("cross_entropy_both", _fused))
    for width, dtype, smoothing in (
        ("V128256", torch.bfloat16, 0.0),
        ("V128256", torch.bfloat16, 0.1),
        ("V16032 of 8", torch.bfloat16, 0.0),
        ("V50257", torch.bfloat16, 0.0),
        ("V128256", torch.float16, 0.0),
        ("V128256", torch.float32, 0.0),
    )
    if (kernel, width) != ("cross_entropy_both", "V16032 of 8")
]
