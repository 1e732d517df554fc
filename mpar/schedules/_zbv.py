"""ZB-V: two chunks per rank, placed as a V, each half of the backward where it leaves no bubble."""

from mpar.schedules._action import Action
from mpar.schedules._phases import Phases
from mpar.schedules._sizes import check_sizes

__all__ = ["zbv"]


def zbv(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """ZB-V (Qi et al. 2023, arXiv:2401.10241, sec. 6): stages `rank` and 2 num_ranks - 1 - rank on a rank.

    The first rank has both ends of the model. Keeps at most 2 num_ranks microbatches live, summed over both chunks: as many
    activations as 1F1B on its first rank, on all ranks. No rank idles between its first and last action if F, I and W take the
    same time and num_microbatches >= 2 num_ranks. Rank 1 of 2, with 3:
        1F0  2F0 1F1  2F1 2I0 2W0  1F2 1I0 1W0 2F2 2I1 2W1  1I1 2I2  1I2 1W1  2W2  1W2
    """
    check_sizes("zbv", rank, num_ranks, num_microbatches)
    # the order is that of at least 2 num_ranks - 1 microbatches, without those that do not exist
    steps = max(num_microbatches, 2 * num_ranks - 1)
    stages = (rank, 2 * num_ranks - 1 - rank)
    phases = Phases(stages)
    emit = phases.emit
    (f0, i0, w0), (f1, i1, w1) = [[(stage, kind) for kind in "FIW"] for stage in stages]
    forwards_left = steps - 2 * num_ranks + rank + 1  # of chunk 0 after the warm-up
    emit(2 * (num_ranks - rank) - 1, f0)
    emit(rank, f1, f0)
    emit(num_ranks - rank, f1, i1, w1)
    emit(forwards_left, f0, i0, w0, f1, i1, w1)
    emit(steps - num_ranks - forwards_left, i0, w0, f1, i1, w1)
    emit(rank, i0, i1)
    emit(num_ranks - rank, i0, w0)
    emit(rank, w1)
    emit(rank, w0)
    return phases.actions(num_microbatches)
