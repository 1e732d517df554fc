"""The passes that make a traced graph canonical, in order. All keep every value, bit for bit, but for where a sum is divided."""

from torch import fx

from mpar.sharding._canonicalise import (
    common_subexpressions,
    erase_identities,
    merge_views,
    restore_einsums,
    shrink_constants,
    split_means,
)
from mpar.sharding._expands import expand_late, merge_expands

__all__ = ["CANONICAL", "canonicalise"]

CANONICAL = (
    erase_identities,
    restore_einsums,
    split_means,
    shrink_constants,
    merge_views,
    merge_expands,
    expand_late,
    merge_expands,
    common_subexpressions,
)


def canonicalise(graph: fx.Graph) -> dict[str, int]:
    """Run the passes in order; returns their statistics."""
    statistics: dict[str, int] = {}
    for run in CANONICAL:
        for name, count in run(graph).items():
            statistics[name] = statistics.get(name, 0) + count
    return statistics
