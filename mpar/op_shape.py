"""Op shape: what the rate of an op depends on, besides its FLOPs and bytes, if it multiplies matrices."""

from dataclasses import dataclass

__all__ = ["AttentionShape", "MatmulShape"]


@dataclass(frozen=True)
class MatmulShape:
    """`batch` products of an (m, k) with a (k, n) matrix, one after the other or at once."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class AttentionShape:
    """Attention of heads of `head_size` to `keys`, `causal` or not; its forward, or its backward."""

    head_size: int
    keys: int
    causal: bool
    backward: bool
