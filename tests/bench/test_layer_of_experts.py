"""The MoE layer's benchmark: every variant computes the same; bars are read off the figures."""

import pytest
import torch

from bench._result import Result
from bench.moe._layer import BARS, ResultsDiffer, check_results, layer, table
from bench.moe._variants import VARIANTS, Case, Data, make

TINY = Case(tokens=48, d=16, mlp=24, experts=4, top_k=2)


def test_every_variant_is_measured():
    """At a tiny size there is a line for each, results agree, and no bar is claimed for another size."""
    lines = layer(TINY, 1, passes=2, steps=1)
    assert [line.text("variant") for line in lines] == list(VARIANTS) and lines[0].number("largest_difference") < 1e-5
    assert not any(line.has("bar") for line in lines) and len(table(lines).splitlines()) == 2 + len(VARIANTS)
    assert all(line.numbers("mpar_over_this_wall")[1] > 0 for line in lines[1:])


def test_the_dense_layer_is_the_experts_when_they_are_equal():
    """With one weight for all experts a token's result is that of the dense layer: same work, same function."""
    data = Data.draw(TINY)
    for name in ("gate_EDF", "up_EDF", "down_EFD"):
        weight = getattr(data.params, name)
        weight.copy_(weight[:1].expand_as(weight))
    y, dense = make("mpar", TINY, data)()["y"], make("dense", TINY, data)()["y"]
    torch.testing.assert_close(y[0], dense[: TINY.tokens])
    torch.testing.assert_close(dense[: TINY.tokens], dense[TINY.tokens :])


def test_results_that_differ_stop_the_benchmark():
    """A gradient that is off by 1e-4, or is not a number, is named."""
    x = torch.ones(4)
    assert check_results({"a": {"y": x}, "b": {"y": x}}) == 0.0
    for wrong in (x * 1.0001, x * torch.nan):
        with pytest.raises(ResultsDiffer, match="y of b"):
            check_results({"a": {"y": x}, "b": {"y": wrong}})


def test_bars_are_judged():
    """The whole interval under the bar is met, its lower end straddled, nothing of it missed."""
    line = {"variant": "dense", "threads": 1, "experts": 8, "top_k": 2, "d": 512, "mlp": 1024, "tokens": 4096, "median_ms": 1.0}
    line |= {"cpu_ms": 1.0, "gflop_per_s": 1.0, "foreign_cores": [0.0], "bar": BARS["dense"]}
    for low, high, word in ((1.0, 1.2, "met"), (1.2, 1.4, "straddled"), (1.4, 1.5, "**missed**")):
        assert f"1.3 {word}" in table([Result.of(line | {"mpar_over_this_wall": [low, low, high]})])
