"""Shapes: the sizes of the kernel calls that production makes, one declaration each.

`tools/kernel_gate` compiles these calls and `bench/kernels` times them, so both take their sizes from here. This module is in
tools because bench may import from tools, and tools import nothing from bench.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "ADAMW",
    "ADAMW_TENSORS",
    "ATTENTION",
    "ATTENTION_LATENT",
    "ATTENTION_LENGTHS",
    "ATTENTION_LONG",
    "ATTENTION_PACKED",
    "ATTENTION_SMALL_HEADS",
    "ATTENTION_WINDOW",
    "CROSS_ENTROPY",
    "CROSS_ENTROPY_SHARD",
    "CROSS_ENTROPY_UNPADDED",
    "EXPERTS",
    "FP8_MATMUL",
    "GATE",
    "GROUPED_MATMUL",
    "HEAD_LOSS",
    "HEAD_LOSS_LONG",
    "MERGE",
    "NORMS",
    "PAGED",
    "PERMUTE",
    "QUANTISE",
    "ROPE",
    "ROPE_LONG",
    "ROUTER",
    "SSD",
    "Shape",
]


@dataclass(frozen=True)
class Shape:
    """The sizes of a call by the names of its dims.

    tiny: if the benchmark times the call, smaller sizes that Triton's interpreter can carry out on a CPU; {} if the call is only
    compiled.
    """

    sizes: Mapping[str, int]
    tiny: Mapping[str, int] = field(default_factory=dict)

    def dims(self, names: str) -> tuple[int, ...]:
        """The sizes of dims whose names are one letter each: `dims("TD")` is those of T and of D."""
        return tuple(self.sizes[name] for name in names)


_BLOCK = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096), (4096,), (4096,))
ADAMW_TENSORS = 2 * _BLOCK
"""The sizes of the parameters of two Llama blocks."""
ADAMW = Shape({"elements": 1_000_000_000, "tensors": 4}, {"elements": 96, "tensors": 2})

_ATTENTION_TINY = {"B": 1, "S": 40, "N": 2, "K": 1, "H": 64}
_HEADS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "64": ({"H": 64}, {}),
    "128": ({"H": 128}, _ATTENTION_TINY),
    "256": ({"H": 256}, {}),
    "192,128": ({"H": 192, "V": 128}, {}),
}
ATTENTION = {name: Shape({"B": 2, "S": 8192, "N": 32, "K": 8} | head, tiny) for name, (head, tiny) in _HEADS.items()}
"""Grouped heads of every size. H: the head size; V: the head size of values, where it differs."""
ATTENTION_LONG = Shape({"B": 1, "S": 16384, "N": 16, "K": 16, "H": 128}, _ATTENTION_TINY)
ATTENTION_SMALL_HEADS = Shape({"B": 4, "S": 4096, "N": 32, "K": 32, "H": 64}, _ATTENTION_TINY)
ATTENTION_PACKED = Shape({"B": 1, "S": 32768, "N": 32, "K": 8, "H": 128, "documents": 24}, _ATTENTION_TINY | {"documents": 3})
ATTENTION_WINDOW = Shape({"B": 1, "S": 32768, "N": 32, "K": 8, "H": 128, "window": 4096}, _ATTENTION_TINY | {"window": 9})
ATTENTION_LATENT = Shape(
    {"B": 2, "S": 8192, "N": 16, "K": 16, "H": 192, "V": 128}, {"B": 1, "S": 40, "N": 2, "K": 2, "H": 192, "V": 128}
)
_TOKENS = 16384
ATTENTION_LENGTHS = tuple(
    Shape({"B": max(1, _TOKENS // S), "S": S, "N": N, "K": N, "H": H}, _ATTENTION_TINY)
    for S in (1024, 2048, 4096, 8192, 32768)
    for H, N in ((128, 16), (64, 32))
)
"""Lengths from 1k to 32k, with as many sequences as make 16k tokens."""
MERGE = Shape({"S": 32768, "N": 32, "H": 128}, {"S": 9, "N": 2, "H": 64})

_PAGED = {"T": 16, "R": 16, "L": 512, "page_size": 16, "N": 32, "K": 8}
PAGED = {
    "64": Shape(_PAGED | {"H": 64}),
    "128": Shape(_PAGED | {"H": 128}),
    "256": Shape(_PAGED | {"H": 256, "N": 16}),
    "576": Shape(_PAGED | {"H": 576, "N": 128, "K": 1}),
}
"""One token of each of R rows, which have L pages each."""

GATE = Shape({"M": 16384, "F": 14336}, {"M": 3, "F": 40})
"""The hidden layer of a Llama block: SwiGLU, and GeGLU."""

NORMS = {
    N: Shape({"M": 16384, "N": N}, {"M": 5, "N": 48} if N in (4096, 8192) else {})
    for N in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
}
"""Shapes by width, one for every width class of the table of launches."""

ROPE = Shape({"B": 2, "S": 8192, "N": 32, "K": 8})
"""Without a head size: cases add several."""
ROPE_LONG = Shape({"S": 16384, "N": 32, "K": 8, "H": 128}, {"S": 5, "N": 4, "K": 2, "H": 16})

CROSS_ENTROPY = Shape({"T": 8192, "V": 128256}, {"T": 5, "V": 72})
CROSS_ENTROPY_SHARD = Shape({"T": 8192, "V": 16032, "shards": 8}, {"T": 5, "V": 40, "shards": 4})
CROSS_ENTROPY_UNPADDED = Shape({"T": 8192, "V": 50257})
_HEAD_TINY = {"T": 5, "D": 16, "V": 72}
HEAD_LOSS = Shape({"T": 8192, "D": 4096, "V": 128256}, _HEAD_TINY)
HEAD_LOSS_LONG = Shape({"T": 32768, "D": 4096, "V": 128256}, _HEAD_TINY)

ROUTER = Shape({"T": 16384, "E": 128, "k": 8}, {"T": 7, "E": 8, "k": 2})
PERMUTE = Shape({"T": 16384, "k": 8, "D": 2048, "E": 128}, {"T": 6, "k": 2, "D": 32, "E": 4})
GROUPED_MATMUL = Shape({"R": 131072, "E": 128, "D": 2048, "F": 1536}, {"R": 24, "E": 3, "D": 32, "F": 48})
"""R: rows of all experts, k for each of 16384 tokens."""
EXPERTS = Shape({"T": 16384, "E": 128, "k": 8, "D": 2048, "F": 768}, {"T": 7, "E": 4, "k": 2, "D": 32, "F": 16})

QUANTISE = Shape({"M": 16384, "N": 4096}, {"M": 128, "N": 128})
FP8_MATMUL = Shape({"M": 8192, "N": 8192, "K": 8192}, {"M": 16, "N": 144, "K": 256})

SSD = Shape({"T": 16384, "N": 80, "P": 64, "state": 128})
"""There is no kernel for it yet."""
