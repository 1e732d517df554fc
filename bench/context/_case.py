"""What is run: the peers' config at another length, the ways of spreading it, who is compared with whom."""

from dataclasses import replace
from typing import Any

__all__ = ["METHODS", "PAIRS", "VARIANTS", "sized"]

METHODS = ("ring", "all_gather", "all_to_all")
"""Of mpar."""

PEERS = {
    "ring": ("torch:ring",),
    "all_gather": ("torch:all_gather", "torch:dtensor_all_gather"),
    "all_to_all": ("torch:all_to_all", "torch:dtensor_all_to_all"),
}
VARIANTS = (
    *(f"{ours}:{method}" for ours in ("mpar", "mpar_gloo") for method in METHODS),
    *(peer for peers in PEERS.values() for peer in peers),
)
PAIRS = {f"{ours}:{method}": PEERS[method] for ours in ("mpar", "mpar_gloo") for method in METHODS}
PAIRS |= {f"mpar:{method}/{slices}": (f"mpar:{method}",) for method in METHODS for slices in (2, 4, 8)}
"""Who is compared with whom; `ring/4` is the ring with rows in 4 slices, beside the same without."""


def sized(cfg: Any, seq: int, batch: int) -> Any:
    """The config at this length. As many key heads as query heads, since torch's ring has no groups of heads."""
    return replace(cfg, seq=seq, batch=batch, kv_heads=cfg.heads)
