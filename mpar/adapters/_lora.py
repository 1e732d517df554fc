"""LoRA: what an adapter is like: its rank, its scale, how it begins, which matrices have one."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mpar.errors import ConfigError, brief

__all__ = ["ALL_LINEAR", "LoRA"]

ALL_LINEAR = "all-linear"
_STARTS = ("kaiming", "gaussian", "random", "pissa", "olora")


@dataclass(frozen=True)
class LoRA:
    """An adapter of Hu et al. 2021 (arXiv:2106.09685), with the variants that PEFT has; names and meanings are PEFT's.

    rank, alpha:    the product A B is multiplied by alpha / rank; with `rslora` by alpha / sqrt(rank) (arXiv:2312.03732).
    dropout:        with which probability training drops each feature of what A is multiplied with.
    dora:           a magnitude for each output is trained, too (Liu et al. 2024, arXiv:2402.09353).
    init:           kaiming: A uniform, B zero. gaussian: A normal with std 1 / rank, B zero. random: both uniform.
                    pissa: the largest singular vectors (arXiv:2404.02948), olora: of a QR decomposition (arXiv:2406.01775);
                    these two change the weight.
    targets:        names of modules or their ends, "all-linear", or a regular expression that matches full names; a parameter
                    that is no module's weight, such as `experts.gate_up_proj`, has its own name. exclude: likewise, not these.
    layers:         the numbers of the layers that have adapters; None for all.
    rank_pattern, alpha_pattern: rank and alpha of modules whose names end as a regular expression says.
    modules_to_save: names of modules that are trained in full.
    bias:           none | all | lora_only: which biases are trained.
    b_rate:         by what the learning rate of B is multiplied (LoRA+, Hayou et al. 2024, arXiv:2402.12354).
    Raises ConfigError with everything that is wrong.
    """

    rank: int = 8
    alpha: float = 8
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: Literal["kaiming", "gaussian", "random", "pissa", "olora"] = "kaiming"
    targets: str | tuple[str, ...] = ALL_LINEAR
    exclude: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    modules_to_save: tuple[str, ...] = ()
    bias: Literal["none", "all", "lora_only"] = "none"
    b_rate: float = 1.0

    def __post_init__(self) -> None:
        ranks = [self.rank, *self.rank_pattern.values()]
        alphas = [self.alpha, *self.alpha_pattern.values()]
        problems = [f"rank={rank}: must be a positive int" for rank in ranks if not isinstance(rank, int) or rank < 1]
        problems += [f"alpha={alpha}: must be a positive number" for alpha in alphas if not 0 < alpha < math.inf]
        problems += [] if 0 <= self.dropout < 1 else [f"dropout={self.dropout}: must be in [0, 1)"]
        problems += [] if 0 < self.b_rate < math.inf else [f"b_rate={self.b_rate}: must be a positive number"]
        problems += [] if self.init in _STARTS else [f"init={self.init!r}: must be one of {', '.join(_STARTS)}"]
        problems += [] if self.bias in ("none", "all", "lora_only") else [f"bias={self.bias!r}: must be none, all or lora_only"]
        problems += [] if self.targets else ["targets are empty: no matrix would have an adapter"]
        patterns = [text for text in (self.targets, self.exclude) if isinstance(text, str)]
        for pattern in (*patterns, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"{pattern!r} is no regular expression: {error}")
        if problems:
            raise ConfigError(f"cannot make {brief(self)}:\n  " + "\n  ".join(problems))

    def rank_of(self, name: str) -> int:
        """The rank of the adapter of a module."""
        return int(_of_pattern(self.rank_pattern, name, self.rank))

    def scale_of(self, name: str) -> float:
        """By what the product A B of a module is multiplied."""
        rank, alpha = self.rank_of(name), _of_pattern(self.alpha_pattern, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _of_pattern(patterns: Mapping[str, float], name: str, otherwise: float) -> float:
    """The value of the first pattern that the name or an end of it matches, as PEFT has it."""
    return next((value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", name)), otherwise)
