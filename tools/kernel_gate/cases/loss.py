"""Cross-entropy over the vocabulary of Llama 3, an eighth of it, GPT-2's without padding, and fused with the head."""

import math

import torch
from torch import Tensor

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make

NUM_TOKENS, HIDDEN_SIZE = 8192, 4096
WIDTHS = {"V128256": 128256, "V16032 of 8": 16032, "V50257": 50257}


def _params(num_columns: int, smoothing: float) -> dict[str, float]:
    vocab_size = 128256 if num_columns == 16032 else num_columns
    return {"ignore_index": -100, "vocab_size": vocab_size, "start": _start(num_columns), "label_smoothing": smoothing}


def _start(num_columns: int) -> int:
    """The first column of the shard, which is the second of eight."""
    return 16032 if num_columns == 16032 else 0


def _labels(make: Make, num_columns: int) -> Tensor:
    """Labels of which, where the columns are a shard, half are in it."""
    return make((NUM_TOKENS,), torch.int64) + max(_start(num_columns) - 50, 0)


def _forward(make: Make, num_columns: int, dtype: torch.dtype, smoothing: float) -> object:
    name = "cross_entropy_stats" if num_columns == 16032 else "cross_entropy"
    labels = _labels(make, num_columns)
    return implementation(name, "triton")(make((NUM_TOKENS, num_columns), dtype), labels, **_params(num_columns, smoothing))


def _backward(make: Make, num_columns: int, dtype: torch.dtype, smoothing: float) -> object:
    labels, dloss = _labels(make, num_columns), make((NUM_TOKENS,), torch.float32)
    dlse = make((NUM_TOKENS,), torch.float32) if smoothing else None
    logits, params = make((NUM_TOKENS, num_columns), dtype), _params(num_columns, smoothing)
    lse = _log_sum_exp(make, logits, params["vocab_size"] / num_columns)
    return implementation("cross_entropy_bwd", "triton")(logits, labels, lse, dloss, dlse, **params)


def _log_sum_exp(make: Make, logits: Tensor, num_shards: float) -> Tensor:
    """Of the whole vocabulary, as if its other shards summed to as much; references of whole rows take it from the logits."""
    if logits.is_meta:
        return make(logits.shape[:1], torch.float32)
    return logits.float().logsumexp(1) + math.log(num_shards)


def _fused(make: Make, num_columns: int, dtype: torch.dtype, smoothing: float) -> object:
    x, head = make((NUM_TOKENS, HIDDEN_SIZE), dtype), make((HIDDEN_SIZE, num_columns), dtype)
    head.mul_(HIDDEN_SIZE**-0.5)  # logits are of size 1
    labels, dloss = _labels(make, num_columns), make((NUM_TOKENS,), torch.float32)
    params = _params(num_columns, smoothing) | {"chunk": NUM_TOKENS}
    return implementation("linear_cross_entropy_grad", "triton")(x, head, labels, dloss, **params)


def _case(kernel: str, run, width: str, dtype: torch.dtype, smoothing: float = 0.0) -> Case:
    name = " ".join((kernel, width, str(dtype).removeprefix("torch."), *(["smoothed"] if smoothing else [])))
    num_columns = WIDTHS[width]
    return Case(name, (kernel,), lambda make: run(make, num_columns, dtype, smoothing))


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
