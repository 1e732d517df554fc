"""Forwards only: for evaluation, with the placement of the training."""

from mpar.schedules._action import Action
from mpar.schedules._interleaved import chunk_order, groups_of
from mpar.schedules._one_f_one_b import alternate
from mpar.schedules._sizes import check_sizes

__all__ = ["forward_only"]


def forward_only(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, placement: str = "loop"
) -> tuple[Action, ...]:
    """Every forward, no backward.

    placement: "loop": stage c * num_ranks + rank is chunk c; groups of microbatches go through the chunks as in `interleaved`.
    "v": a rank has stages `rank` and 2 num_ranks - 1 - rank, as in zbv; num_chunks is 2. The bubble is (num_ranks - 1) F, or
    twice this with "v", where each microbatch ends on the rank where it began. Rank 0 of 2, 2 chunks, with 3, "loop" and "v":
        0F0 0F1 0F2  2F0 2F1 2F2
        0F0  0F1 3F0  0F2 3F1  3F2
    """
    rules = {
        f"placement is {placement!r}, needs to be 'loop' or 'v'": placement in ("loop", "v"),
        f"placement='v' has 2 chunks, not {num_chunks}: leave num_chunks=2, or use placement='loop'": placement != "v"
        or num_chunks == 2,
    }
    check_sizes("forward_only", rank, num_ranks, num_microbatches, num_chunks, rules)
    if placement == "loop":
        groups = groups_of("forward_only", num_ranks, num_microbatches)
        return tuple(chunk_order("F", rank, num_ranks, range(num_chunks), groups))
    outbound, inbound = [[Action(stage, "F", m) for m in range(num_microbatches)] for stage in (rank, 2 * num_ranks - 1 - rank)]
    return alternate(outbound, inbound, num_ranks - 1 - rank)
