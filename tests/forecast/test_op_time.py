"""The time of one op: its shape decides its rate; published rates of an H100 are met."""

from dataclasses import replace
from statistics import median

import pytest

from mpar.hardware import hardware
from mpar.ir import OpUse, op_time
from mpar.op_shape import AttentionShape, MatmulShape

H100 = hardware("h100_dgx")

XLA_H100 = """
256x256x256 6.5; 512x512x256 22; 1024x1024x1024 236; 1024x2048x1024 373; 2048x2048x512 345; 2048x4096x256 299;
1024x1024x4096 470; 4096x4096x512 543; 4096x1024x1024 488; 2048x4096x1024 594; 4096x512x4096 650; 4096x2048x2048 716;
4096x1024x4096 738; 4096x4096x2048 739; 2048x4096x4096 754; 4096x256x4096 376; 512x4096x4096 644; 256x4096x4096 412;
512x512x4096 175; 256x256x4096 84; 4096x256x256 82
"""
"""m x n x k and TFLOP/s of bf16 products on an H100: the table by which XLA interpolates them (tensorflow at 372d578)."""

FLASH_ATTENTION = {
    True: {512: 163, 1024: 221, 2048: 265, 4096: 294, 8192: 308, 16384: 328},
    False: {512: 248, 1024: 294, 2048: 320, 4096: 326, 8192: 335, 16384: 338},
}
"""TFLOP/s, forward and backward, of FlashAttention-2 on an H100, heads of 128, by whether it is causal and its length."""


def product(m: int, n: int, k: int, batch: int = 1) -> OpUse:
    return OpUse(2 * batch * m * n * k, 2 * batch * (m * n + m * k + n * k), "bfloat16", matmul=MatmulShape(batch, m, n, k))


def test_products_of_an_h100_as_xla_measured_them():
    errors = []
    for row in XLA_H100.replace("\n", " ").split(";"):
        shape, published = row.split()
        use = product(*map(int, shape.split("x")))
        errors.append(abs(1e-12 * use.flops / op_time(use, H100) / float(published) - 1))
    assert median(errors) < 0.11
    assert sorted(errors)[int(0.9 * len(errors))] < 0.20


@pytest.mark.parametrize("causal", [True, False])
def test_attention_gains_rate_with_its_length_as_published(causal):
    published = FLASH_ATTENTION[causal]
    shapes = {keys: AttentionShape(128, keys, causal, backward=False) for keys in published}
    rates = {keys: 1e12 / op_time(OpUse(10**12, 0, "bfloat16", attention=shape), H100) for keys, shape in shapes.items()}
    longest = max(published)
    for keys, rate in published.items():
        assert rates[keys] / rates[longest] == pytest.approx(rate / published[longest], rel=0.08)


def test_a_product_that_does_not_fill_its_tiles_takes_as_long_as_one_that_does():
    assert op_time(product(8192, 8192 - 7, 4096), H100) == op_time(product(8192, 8192, 4096), H100)


def test_no_shape_is_slower_than_a_larger_one():
    sizes = (64, 200, 512, 1000, 4096)
    for m in sizes:
        times = [op_time(product(m, n, 1024), H100) for n in sizes]
        assert times == sorted(times)


def test_without_multiprocessors_shapes_do_not_count():
    plain = replace(H100, multiprocessors=0, launch_s=0.0)
    assert op_time(product(17, 19, 23), plain) == pytest.approx(
        max(2 * 17 * 19 * 23 / plain.flops_per_s["bfloat16"], 2 * (17 * 19 + 17 * 23 + 19 * 23) / plain.memory_bytes_per_s)
    )


def test_backward_has_a_rate_of_its_own():
    rates = {"forward": 4e14, "backward": 2e14}
    device = replace(H100, attention_flops_per_s=rates)
    long = [AttentionShape(128, 10**9, True, backward=backward) for backward in (False, True)]
    forward, backward = (op_time(OpUse(10**12, 0, "bfloat16", attention=shape), device) for shape in long)
    assert backward == pytest.approx(2 * forward, rel=1e-3)
