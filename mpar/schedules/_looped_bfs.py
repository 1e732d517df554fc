"""Looped BFS: breadth first, all microbatches through one chunk before the next."""

from mpar.schedules._action import Action
from mpar.schedules._sizes import check_sizes

__all__ = ["looped_bfs"]


def looped_bfs(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, order: str = "ascending"
) -> tuple[Action, ...]:
    """Breadth-first pipeline (Lamy-Poirier 2023, arXiv:2211.05953); stage c * num_ranks + rank is chunk c.

    A chunk's weights are needed once in each direction, and its gradients are complete early. Keeps all num_chunks *
    num_microbatches live. If num_microbatches >= num_ranks, the bubble is (num_ranks - 1) (F + B) of a chunk.
    order: the order of microbatches in backwards. "torch" descends, as torch.distributed.pipelining does, so that gradients are
    summed in another order than by all other schedules. Rank 0 of 2, 2 chunks, with 2:
        0F0 0F1  2F0 2F1  2B0 2B1  0B0 0B1
    """
    rules = {f"order is {order!r}, needs to be 'ascending' or 'torch'": order in ("ascending", "torch")}
    check_sizes("looped_bfs", rank, num_ranks, num_microbatches, num_chunks, rules)
    microbatches = range(num_microbatches)
    backward = microbatches if order == "ascending" else microbatches[::-1]
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    return tuple(
        [Action(stage, "F", m) for stage in stages for m in microbatches]
        + [Action(stage, "B", m) for stage in reversed(stages) for m in backward]
    )
