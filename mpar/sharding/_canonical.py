"""The passes that make a traced graph canonical, in order. They keep the bits of every value, except that a mean becomes a sum
that is then divided, and a loss becomes the ops that it means."""

from collections.abc import Callable

from torch import fx

from mpar.sharding._canonicalise import (
    common_subexpressions,
    erase_identities,
    merge_views,
    restore_einsums,
    shrink_constants,
    split_means,
    use_one_name,
)
from mpar.sharding._decompose import decompose
from mpar.sharding._expands import expand_late, merge_expands
from mpar.sharding._flatten_late import flatten_late
from mpar.sharding._join_pads import join_pads
from mpar.sharding._losses import expand_losses
from mpar.sharding._permute_late import permute_late
from mpar.sharding._split_indices import split_indices
from mpar.sharding._unit_dims import drop_unit_letters, insert_unit_dims_late
from mpar.sharding._windows import join_windows

__all__ = ["CANONICAL", "canonicalise"]

ONCE = (expand_losses, decompose, use_one_name, erase_identities, split_means, shrink_constants)
AGAIN = (
    restore_einsums,
    join_windows,
    join_pads,
    merge_views,
    permute_late,
    insert_unit_dims_late,
    drop_unit_letters,
    flatten_late,
    split_indices,
    merge_expands,
    expand_late,
)
"""These are repeated until none changes anything, because each may give another something to do. This ends, because each merges
views, or moves a view, a permute or an expand towards the results."""
CANONICAL = (*ONCE, *AGAIN, common_subexpressions)


def canonicalise(graph: fx.Graph) -> dict[str, int]:
    """Run the passes in order; returns their statistics, added up."""
    statistics: dict[str, int] = {}

    def run(graph_pass: Callable[[fx.Graph], dict[str, int]]) -> int:
        counts = graph_pass(graph)
        for name, count in counts.items():
            statistics[name] = statistics.get(name, 0) + count
        return sum(counts.values())

    for graph_pass in ONCE:
        run(graph_pass)
    while sum([run(graph_pass) for graph_pass in AGAIN]):
        pass
    run(common_subexpressions)
    return statistics
