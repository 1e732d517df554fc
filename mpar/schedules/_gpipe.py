"""GPipe: all forwards, then all backwards."""

from mpar.schedules._action import Action
from mpar.schedules._sizes import check_sizes

__all__ = ["gpipe"]


def gpipe(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards, both in ascending order (Huang et al. 2019, arXiv:1811.06965).

    Keeps all microbatches live. Bubble (num_ranks - 1) (F + B). Rank 2 of 4, with 3:
        2F0 2F1 2F2  2B0 2B1 2B2
    """
    check_sizes("gpipe", rank, num_ranks, num_microbatches)
    return tuple([Action(rank, kind, m) for kind in "FB" for m in range(num_microbatches)])
