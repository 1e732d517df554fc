"""Case: a model and a batch. Variant: one way to train it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mpar.conf_dir import conf_dir

__all__ = ["CASES", "MEMORY_RATIO", "PEAK_FLOPS_PER_S", "SPEED_RATIO", "VARIANTS", "Case", "Variant", "main_peer"]

PEAK_FLOPS_PER_S = 989e12
"""The peak of an H100 or H200 in dense bfloat16 (data sheet, SXM), to which MFU refers."""
SPEED_RATIO, MEMORY_RATIO = 1.15, 0.85
"""Bars: the least ratio of our tokens per second to the peer's, and the largest ratio of our peak memory to the peer's."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}
TINY_HEAD = {"head_dim": 8}


@dataclass(frozen=True)
class Case:
    """`sequences` of `seq_len` tokens through the model of `conf/model/<model>.yaml`.

    share: the share of the time that the case gets if all cases run.
    tokens_per_s: a bar, where others have published a speed on such a chip.
    """

    model: str
    sequences: int
    seq_len: int
    share: float
    tokens_per_s: float | None = None
    tiny: bool = False

    @property
    def key(self) -> str:
        """Its name on the command line and in the results."""
        return f"{self.model}_x{self.sequences}"

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.seq_len

    def config(self) -> dict[str, Any]:
        """The config.json of its model."""
        file = conf_dir() / "model" / f"{self.model}.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8"))["config"]
        if self.tiny:
            config |= TINY | ({} if "head_dim" not in config else TINY_HEAD)
        return config

    def shrunk(self) -> "Case":
        """The same with toy sizes."""
        return Case(self.model, self.sequences, 16, self.share, tiny=True)


@dataclass(frozen=True)
class Variant:
    """mpar by `execution`; or transformers, with parameters of dtype `weights`, and with Liger's kernels if `liger`."""

    name: str
    execution: str = ""
    weights: str = ""
    liger: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is mpar."""
        return bool(self.execution)


CASES = (
    Case("megatron_1b7", 4, 4096, 0.45, 36_200.0),
    Case("llama3_2_3b", 1, 8192, 0.45),
    Case("megatron_1b7", 2, 4096, 0.05, 36_200.0),
    Case("megatron_1b7", 1, 4096, 0.05, 36_200.0),
)
"""In order of importance. 36.2 k tokens/s are the 408.8 TFLOP/s of an H100, counting all pairs, of Megatron-LM's README (0.8)."""

VARIANTS = (
    Variant("mpar eager", execution="eager"),
    Variant("transformers fp32", weights="float32"),
    Variant("mpar cuda_graph", execution="cuda_graph"),
    Variant("transformers fp32 liger", weights="float32", liger=True),
    Variant("mpar inductor", execution="inductor"),
    Variant("transformers bf16", weights="bfloat16"),
    Variant("transformers bf16 liger", weights="bfloat16", liger=True),
)
"""In order of importance. Only peers with float32 masters train as ours do; those in bf16 are shown, but bars leave them out."""


def main_peer(names: Sequence[str]) -> list[str]:
    """The peers among `names` that ours are compared with by bars."""
    return [variant.name for variant in VARIANTS if variant.name in names and variant.weights == "float32"]
