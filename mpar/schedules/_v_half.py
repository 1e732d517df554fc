"""V-Half: half the activation memory of 1F1B, half its bubble, on a V of two chunks."""

from mpar.schedules._action import Action
from mpar.schedules._phases import Phases
from mpar.schedules._sizes import check_sizes

__all__ = ["v_half"]


def v_half(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """V-Half (Qi et al. 2024, arXiv:2405.15362): stages `rank` and 2 num_ranks - 1 - rank on a rank.

    Keeps at most num_ranks + 2 microbatches live, summed over both chunks, if num_ranks is even, or num_ranks + 1 if it is odd:
    2 num_ranks is what 1F1B needs on its first rank. If F, I and W take one unit each and num_microbatches >= num_ranks > 2, the
    bubble is 3 num_ranks - 5 units, or 3 num_ranks - 4 if it is odd: half of what 1F1B has, 6 (num_ranks - 1), less one or two.

    The bounds are the paper's, the order is our own. It is made for an odd number of ranks, where all six actions of all ranks
    fit into one another; an even number has the order of one rank more, without its first. Three phases:
      fill:  forwards as they come in, up to what the main phase holds of each chunk. Then the second chunk begins its backward,
             which frees what its next forwards take, until gradients reach the first chunk.
      main:  one action of each sort in turn. Each operand is there when its turn comes, also if messages take 1/2 unit.
      drain: once the first chunk has no forwards left, W gives way to I and F, for which other ranks wait. Rank 1 of 2, with 3:
        1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2W0 2F2 2I1 1I1 1W1 2W1 2I2 1I2 1W2 2W2
    """
    check_sizes("v_half", rank, num_ranks, num_microbatches)
    odd = num_ranks + 1 - num_ranks % 2
    place = rank + odd - num_ranks  # of this rank among an odd number
    stages = (rank, 2 * num_ranks - 1 - rank)
    phases = Phases(stages)
    emit = phases.emit
    (f0, i0, w0), (f1, i1, w1) = [[(stage, kind) for kind in "FIW"] for stage in stages]
    first, second = odd - place // 2, place // 2 + 1  # forwards before any backward, as far as memory and operands allow
    alone = min(first, 2 * (odd - place) - 1)  # of these before the first of the second chunk comes in
    emit(alone, f0)
    emit(first - alone, f1, f0)
    emit(second - (first - alone), f1)
    emit(odd // 2 - place // 2, i1, w1, f1)
    if place % 2 == 0:
        emit(num_microbatches, i1, i0, w0, f0, w1, f1)
    else:
        main = max(num_microbatches - first, 0) + 1
        emit(main, i0, w0, i1, w1, f1, f0)
        emit(num_microbatches - main, i0, i1, w0, f1, w1)
    return phases.actions(num_microbatches)
