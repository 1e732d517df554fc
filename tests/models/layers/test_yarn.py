"""YaRN's frequencies by another road: the ends of the ramp found by bisection, and the numbers of transformers."""

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mpar import models
from mpar.models.layers._rope import YarnRope

SIZES = [16, 64, 128]
SETTINGS = {
    "as published": {"theta": 10_000.0, "original": 4096, "factor": 16.0},
    "long": {"theta": 1e6, "original": 32_768, "factor": 4.0},
    "other ends": {"theta": 10_000.0, "original": 2048, "factor": 2.5, "fast": 8.0, "slow": 2.0},
    "ends between pairs": {"theta": 10_000.0, "original": 4096, "factor": 40.0, "fast": 24.0, "slow": 0.7, "truncate": False},
    "starts before the first pair": {"theta": 10_000.0, "original": 128, "factor": 8.0, "fast": 32.0, "slow": 0.25},
    "ends behind the last pair": {"theta": 100.0, "original": 1_000_000, "factor": 8.0, "fast": 5000.0, "slow": 1.0},
    "a step": {"theta": 10_000.0, "original": 4096, "factor": 8.0, "fast": 3.0, "slow": 3.0, "truncate": False},
}
CASES = [pytest.param(size, SETTINGS[name], id=f"{size} {name}") for size, name in itertools.product(SIZES, SETTINGS)]


def expected(size: int, *, theta, original, factor, fast=32.0, slow=1.0, truncate=True) -> list[float]:
    """Pairs that turn often in the original context keep their pace, rare ones are slowed down, those between are mixed.

    The ramp runs from the pair that makes `fast` turns to the one that makes `slow`, to whole pairs outwards.
    """
    turns = lambda pair: original * theta ** (-2 * pair / size) / (2 * math.pi)  # noqa: E731

    def pair_of(wanted: float) -> float:
        low, high = -10.0 * size, 10.0 * size
        for _ in range(200):  # turns fall from pair to pair
            middle = (low + high) / 2
            low, high = (middle, high) if turns(middle) > wanted else (low, middle)
        return low

    start, end = pair_of(fast), pair_of(slow)
    if truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, size - 1)
    out = []
    for pair in range(size // 2):
        slowed = 0.0 if pair <= start else 1.0 if pair >= end else (pair - start) / (end - start)
        pace = theta ** (-2 * pair / size)
        out.append((1 - slowed) * pace + slowed * pace / factor)
    return out


def rope(size: int, *, theta, original, factor, fast=32.0, slow=1.0, truncate=True) -> YarnRope:
    return YarnRope(theta, size, factor, original, 1.0, fast, slow, truncate)


@pytest.mark.parametrize(("size", "setting"), CASES)
def test_frequencies(size, setting):
    """Every pair turns as the definition says, whatever the ends of the ramp."""
    assert rope(size, **setting).frequencies(1) == pytest.approx(expected(size, **setting), rel=1e-9)


@pytest.mark.parametrize("name", ["as published", "long", "other ends", "ends between pairs"])
@pytest.mark.parametrize("size", SIZES)
def test_some_pairs_are_on_the_ramp(size, name):
    """Some are kept, some fully slowed, some between: the settings above try all three."""
    setting = SETTINGS[name]
    paces = zip(plain_pace(size, setting["theta"]), rope(size, **setting).frequencies(1), strict=True)
    slowed = [plain / scaled for plain, scaled in paces]
    assert min(slowed) == pytest.approx(1.0)
    assert max(slowed) == pytest.approx(setting["factor"])
    assert any(1.01 < s < setting["factor"] * 0.99 for s in slowed)


def plain_pace(size: int, theta: float) -> list[float]:
    return [theta ** (-2 * pair / size) for pair in range(size // 2)]


@pytest.mark.parametrize(("size", "setting"), CASES)
def test_frequencies_are_those_of_transformers(size, setting):
    """A config of Hugging Face gives the frequencies and the factor of cos and sin that transformers computes, in float32."""
    parameters = {
        "rope_type": "yarn",
        "rope_theta": setting["theta"],
        "factor": setting["factor"],
        "original_max_position_embeddings": setting["original"],
        "beta_fast": setting.get("fast", 32.0),
        "beta_slow": setting.get("slow", 1.0),
        "truncate": setting.get("truncate", True),
    }
    sizes = {
        "hidden_size": 2 * size,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": size,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "vocab_size": 32,
        "max_position_embeddings": int(setting["original"] * setting["factor"]),
    }
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    model = models.from_config({**sizes, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": parameters})
    ((_, read),) = model.config.ropes
    assert isinstance(read, YarnRope)
    assert read.frequencies(1) == pytest.approx(frequencies.tolist(), rel=3e-6)
    assert read.attention_factor == pytest.approx(factor)
