"""Rates: what one rank computes and moves in a second, in the terms of `Hardware`."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpar import ops
from mpar.kernels import implementation
from mpar.measure._timing import in_turn

__all__ = ["PRODUCT", "measure_rates"]

PRODUCT = {"cpu": (512, 512, 512), "cuda": (8192, 8192, 8192)}
"""(m, n, k) of the product by which the rate of products is measured."""

_MOVED = {"cpu": 2**20, "cuda": 2**28}
"""Elements that are copied to measure the bandwidth of memory: on a CPU as many as activations of small models have."""

_TOKENS = {"cpu": 256, "cuda": 8192}

Measure = Callable[[Callable[[], object]], float]


def measure_rates(device: torch.device, dtypes: Sequence[torch.dtype], seconds: Measure) -> Iterator[tuple[str, float]]:
    """(name of a rate, its value) one after the other. `seconds` gives those of one call, while all ranks make it."""
    with _one_kind_of_product():
        for dtype in dtypes:
            yield f"flops_per_s.{_name(dtype)}", _product(seconds, device, dtype)
        yield "launch_s", _launch(seconds, device)
        yield "memory_bytes_per_s", _copy(seconds, device)
        yield "vector_flops_per_s", _vector(seconds, device)
        yield "transcendentals_per_s", _exponentials(seconds, device)
        yield from _attention(seconds, device, dtypes[-1])
        if device.type == "cuda":
            yield "host_bytes_per_s", _to_host(seconds, device)


@contextmanager
def _one_kind_of_product() -> Iterator[None]:
    """Products of float32 in float32, as in training."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product(seconds: Measure, device: torch.device, dtype: torch.dtype) -> float:
    m, n, k = PRODUCT[device.type]

    def make() -> Callable[[], Tensor]:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        return lambda: a @ b

    return 2 * m * n * k / seconds(in_turn(make, device))


def _launch(seconds: Measure, device: torch.device) -> float:
    """A product of so little that all its time is that of calling it, as compiled code does."""
    x, run = torch.zeros(1, 1, 1, device=device), implementation("einsum")
    return seconds(lambda: run(x, x[0], equation="bsd,df->bsf"))


def _copy(seconds: Measure, device: torch.device) -> float:
    source = torch.zeros(_MOVED[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


_CACHED = {"cpu": 2**14, "cuda": 2**22}
"""Elements of values that lie in the cache of a CPU."""


def _vector(seconds: Measure, device: torch.device) -> float:
    """x + w (y - x): 3 FLOPs an element."""
    x, y, w, out = (torch.randn(_CACHED[device.type], device=device) for _ in range(4))
    return 3 * x.numel() / seconds(lambda: torch.lerp(x, y, w, out=out))


def _exponentials(seconds: Measure, device: torch.device) -> float:
    x = torch.randn(_CACHED[device.type], device=device)
    out = torch.empty_like(x)
    return x.numel() / seconds(lambda: torch.exp(x, out=out))


def _attention(seconds: Measure, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Causal attention of 8 heads of 64 (on a GPU 16 of 128), forward and backward: rates of the work, and fixed times."""
    length, heads, size = _TOKENS[device.type], *((8, 64) if device.type == "cpu" else (16, 128))
    pairs = heads * length * length // 2
    for i, (name, flops) in enumerate((("forward", 4), ("backward", 10))):
        usual = in_turn(functools.partial(_attention_call, i, device, dtype, length, heads, size), device)
        usual_s, launch_s = seconds(usual), seconds(_attention_call(i, device, dtype, 4, heads, size))
        yield f"op_launch_s.attention{'_bwd' * (name == 'backward')}", launch_s
        yield f"attention_flops_per_s.{name}", flops * pairs * size / max(usual_s - launch_s, 0.1 * usual_s)


def _attention_call(
    which: int, device: torch.device, dtype: torch.dtype, length: int, heads: int, size: int
) -> Callable[[], object]:
    """Attention as compiled code calls it (0), or its backward (1)."""
    q, k, v = (torch.randn(1, length, heads, size, device=device, dtype=dtype) for _ in range(3))
    operands = (q, k, v, *[None] * 5)
    params = {"causal": True, "window": None, "scale": size**-0.5, "soft_cap": None}
    forward, backward = implementation("attention"), implementation("attention_bwd")
    out, lse = ops.attention(q, k, v)
    grads = [torch.randn_like(out), None]
    return (lambda: forward(*operands, **params), lambda: backward(*operands, out, lse, *grads, **params))[which]


def _to_host(seconds: Measure, device: torch.device) -> float:
    source = torch.zeros(2**26, device=device)
    target = torch.empty(2**26, pin_memory=True)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True))
