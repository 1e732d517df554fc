"""FP8: quantisation by blocks, and products of quantised matrices."""

import functools

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy, tflops, times
from mpar.kernels import implementation
from tools.kernel_shapes import FP8_MATMUL, QUANTISE

__all__ = ["ROWS"]

CHECKED = 256
LARGEST = 448.0  # the largest number of e4m3
FLIPPED = 2e-3
"""Tolerance for e4m3: a quotient in the middle between two numbers may now and then round to either, which differ by 1/8."""


def quantise(setting: Setting, *, M: int, N: int, transposed: bool) -> Built:
    """Quantise rows in blocks of 128 elements, and with `transposed` also columns, which are stored as rows."""
    x = setting.normal(M, N)
    name = "quantise_fp8_both" if transposed else "quantise_fp8"
    formula = _both if transposed else _blocks
    compiled = setting.compiled(formula)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: formula(x), _numbers),
        "torch.compile": Variant(lambda: compiled(x), _numbers),
    }
    ours = Variant(lambda: implementation(name, "triton")(x, block="1x128"), _numbers)
    sides = 2 if transposed else 1
    moved = x.nbytes + sides * (x.numel() + x.numel() // 128 * 4)
    return Built(ours, peers, lambda: _numbers(formula(x.float())), moved, tolerance=FLIPPED)


def multiply(setting: Setting, *, M: int, N: int, K: int, blocks: tuple[str, str]) -> Built:
    """y = a @ b.T with scales of both."""
    quantised = [
        implementation("quantise_fp8")(setting.normal(rows, K), block=block) for rows, block in zip((M, N), blocks, strict=True)
    ]
    (a, a_scale), (b, b_scale) = quantised
    params = {"a_block": blocks[0], "b_block": blocks[1], "dtype": torch.bfloat16}
    ours = Variant(lambda: implementation("fp8_matmul", "triton")(a, a_scale, b, b_scale, **params), _rows)
    peers: dict[str, Variant | str] = {}
    if blocks == ("row", "row"):
        scales = a_scale, b_scale.T.contiguous()
        on_cpu = setting.device.type == "cpu"
        scaled = Variant(lambda: torch._scaled_mm(a, b.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16), _rows)
        peers["torch._scaled_mm"] = "needs a GPU" if on_cpu else scaled

    def reference() -> list[Tensor]:
        wide = implementation("dequantise_fp8")(b, b_scale, block=blocks[1], dtype=torch.float64)
        rows = min(CHECKED, M)
        scale = a_scale[:rows]  # blocks of a are rows, or pieces of rows
        return [implementation("dequantise_fp8")(a[:rows], scale, block=blocks[0], dtype=torch.float64) @ wide.T]

    return Built(ours, peers, reference, M * K + N * K + 2 * M * N, 2 * M * N * K, rate=2.0)


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float().unflatten(1, (-1, 128))
    scale = (wide.abs().amax(2) / LARGEST).clamp(min=2.0**-126)
    q = (wide * (1 / scale)[..., None]).clamp(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return q, scale


def _both(x: Tensor) -> tuple[Tensor, ...]:
    return *_blocks(x), *_blocks(x.T.contiguous())


def _numbers(parts: tuple[Tensor, ...]) -> list[Tensor]:
    return [x[:CHECKED].float() for x in parts]


def _rows(y: Tensor) -> list[Tensor]:
    return [y[:CHECKED]]


ROWS = [
    *(
        Row(
            23,
            "fp8 quantise and transpose" if transposed else "fp8 quantise",
            functools.partial(quantise, transposed=transposed),
            QUANTISE,
            [of_copy(0.80)],
        )
        for transposed in (False, True)
    ),
    Row(
        24,
        "fp8 product, scales by row",
        functools.partial(multiply, blocks=("row", "row")),
        FP8_MATMUL,
        [times("torch._scaled_mm", 0.85)],
        dtype="float8_e4m3fn",
    ),
    Row(
        24,
        "fp8 product, scales by block",
        functools.partial(multiply, blocks=("1x128", "128x128")),
        FP8_MATMUL,
        [tflops(900)],
        dtype="float8_e4m3fn",
    ),
]
