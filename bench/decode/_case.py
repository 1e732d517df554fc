"""What is measured: shapes of models, and requests with the lengths of their answers."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

__all__ = ["BARS", "SHAPES", "WORKLOADS", "Bar", "Shape", "Workload"]


@dataclass(frozen=True)
class Shape:
    """A model with random weights: its config, dtype, and the longest row."""

    config: Mapping[str, object]
    dtype: torch.dtype
    length: int = 1024

    def shrunk(self) -> "Shape":
        """The same with two layers and few features, for tests."""
        small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 199, "head_dim": 8}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        return replace(self, config={**self.config, **small}, length=128)


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(
        {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 2048,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        },
        torch.float32,
    ),
    "qwen2_5_0_5b": Shape(
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 1024,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
}


@dataclass(frozen=True)
class Workload:
    """Requests that come at the same time: the tokens of each prompt, and how many tokens each answer has."""

    prompt: int
    answers: tuple[int, ...]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts."""
        draw = random.Random(0)
        return [[draw.randrange(vocab_size) for _ in range(self.prompt)] for _ in self.answers]


def log_normal(count: int, median: float, sigma: float) -> tuple[int, ...]:
    """The quantiles of a log-normal distribution in the middles of `count` equal parts, in a fixed shuffled order."""
    draw = random.Random(0)
    points = sorted(draw.gauss(0.0, 1.0) for _ in range(count * 1000))[500::1000]
    lengths = [max(1, round(median * math.exp(sigma * point))) for point in points]
    draw.shuffle(lengths)
    return tuple(lengths)


WORKLOADS: Mapping[str, Mapping[str, Workload]] = {
    "tiny": {"one": Workload(32, (96,)), "many": Workload(32, log_normal(16, 32, 1.0)), "prefill": Workload(512, (1,))},
    "qwen2_5_0_5b": {"one": Workload(32, (96,)), "many": Workload(32, log_normal(16, 12, 1.0)), "prefill": Workload(512, (1,))},
}


@dataclass(frozen=True)
class Bar:
    """What mpar has to reach: times the tokens per second of the fastest variant of transformers; tokens per second."""

    ratio: float
    tokens_per_s: float = 0.0


BARS: Mapping[tuple[str, str], Bar] = {
    ("tiny", "one"): Bar(1.5),
    ("tiny", "many"): Bar(3.0),
    ("tiny", "prefill"): Bar(1.0),
    ("qwen2_5_0_5b", "one"): Bar(1.15, 20.0),
    ("qwen2_5_0_5b", "many"): Bar(1.3),
    ("qwen2_5_0_5b", "prefill"): Bar(1.0),
}
