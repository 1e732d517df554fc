"""Op time: the seconds that one op takes on given hardware.

An op takes the time of its arithmetic or of its memory traffic, whichever is longer, and the time of a launch. Products of
matrices run tile by tile on all multiprocessors of a GPU at once, so that their rate depends on their shape (NVIDIA, Matrix
Multiplication Background User's Guide, section 3: tile and wave quantization); the rate of attention depends on its length.
"""

import functools
import math

from mpar.hardware import Hardware
from mpar.ir._kind import OpUse
from mpar.op_shape import AttentionShape, MatmulShape

__all__ = ["op_time"]

TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.55))
"""(rows, columns, share of the best rate that a product of such tiles reaches): small tiles read their operands more often.
The shares are fitted to XLA's table of products on an H100, see tests/forecast/test_op_time.py."""

HALF_RATE_KEYS = {True: 525, False: 190}
"""By whether attention is causal: the number of keys at which it reaches half of its rate. Fitted to the six lengths of
FlashAttention-2 on an H100, head size 128 (assets of flash-attention at 0251105)."""

HALF_RATE_HEAD_SIZE = 20
"""The head size at which attention reaches half of its rate, from sizes 64 and 128 of the same figures and of the A100's."""


def op_time(use: OpUse, hardware: Hardware) -> float:
    """Seconds of all calls of one op."""
    arithmetic_s = _arithmetic_time(use, hardware)
    if hardware.transcendentals_per_s:
        arithmetic_s += use.transcendentals / hardware.transcendentals_per_s
    seconds = max(arithmetic_s, use.bytes / hardware.memory_bytes_per_s) * hardware.op_factors.get(use.name, 1.0)
    return use.calls * (seconds + hardware.op_launch_s.get(use.name, hardware.launch_s))


def _arithmetic_time(use: OpUse, hardware: Hardware) -> float:
    rate = hardware.flops_per_s.get(use.dtype, max(hardware.flops_per_s.values()))
    if use.matmul is not None and hardware.multiprocessors:
        return _matmul_time(use.matmul, rate, hardware.multiprocessors, hardware.wave_s)
    if use.attention is not None:
        return _attention_time(use.attention, use.flops, rate, hardware)
    return use.flops / (rate if use.matmul is not None else hardware.vector_flops_per_s or rate)


def _attention_time(shape: AttentionShape, flops: int, rate: float, hardware: Hardware) -> float:
    rate = hardware.attention_flops_per_s.get("backward" if shape.backward else "forward", rate)
    if not (hardware.multiprocessors and shape.keys and shape.head_size):
        return flops / rate
    return flops / rate * (1 + HALF_RATE_KEYS[shape.causal] / shape.keys) * (1 + HALF_RATE_HEAD_SIZE / shape.head_size)


@functools.lru_cache(maxsize=4096)
def _matmul_time(shape: MatmulShape, rate: float, multiprocessors: int, wave_s: float) -> float:
    """Seconds of a product with the best of `TILES`: a wave has one tile for each multiprocessor."""
    seconds = []
    for rows, columns, share in TILES:
        tiles = shape.batch * math.ceil(shape.m / rows) * math.ceil(shape.n / columns)
        tile_s = 2 * rows * columns * shape.k * multiprocessors / (rate * share)
        seconds.append(math.ceil(tiles / multiprocessors) * (tile_s + wave_s))
    return min(seconds)
