"""V-Min: a third of the activation memory of 1F1B, by repeating one microbatch's pattern as tightly as its operands allow."""

from mpar.schedules._action import Action
from mpar.schedules._sizes import check_sizes

__all__ = ["v_min"]


def v_min(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """V-Min (Qi et al. 2024, arXiv:2405.15362): stages `rank` and 2 num_ranks - 1 - rank on a rank.

    Keeps at most 2 ceil((num_ranks + 2) / 3) microbatches live, summed over both chunks: 2 num_ranks is what 1F1B needs on its
    first rank. On 2, 3 and 5 ranks v_half keeps no more and idles less. Rank 1 of 2, with 3:
        1F0 2F0 2I0 1I0  1F1 2F1 2W0 1W0 2I1 1I1  1F2 2F2 2W1 1W1 2I2 1I2  2W2 1W2
    """
    check_sizes("v_min", rank, num_ranks, num_microbatches)
    shift = 0 if num_ranks % 3 else 2
    first, second = rank, 2 * num_ranks - rank - 1
    times = (first, second, 2 * num_ranks + shift + rank, 4 * num_ranks + shift - rank - 1)
    return _repeat_pattern(rank, num_ranks, num_microbatches, times)


def _repeat_pattern(rank: int, num_ranks: int, num_microbatches: int, times: tuple[int, int, int, int]) -> tuple[Action, ...]:
    """One microbatch's actions every six units of time, as many as its actions on a rank take; W in the gaps, oldest first.

    times: of F in the first chunk, F in the second, I in the second, I in the first, of microbatch 0; different modulo 6.
    """
    early, late = rank, 2 * num_ranks - 1 - rank
    slots: list[tuple[int, str, int] | None] = [None] * 6
    for time, stage, kind in zip(times, (early, late, late, early), "FFII", strict=True):
        assert slots[time % 6] is None, f"two actions at a time: {times}"
        slots[time % 6] = (stage, kind, time // 6)
    order: list[Action] = []
    pending: list[Action] = []  # W whose I ran; those before `done` ran too
    done = 0
    for round_ in range(num_microbatches + max(times) // 6):
        for slot in slots:
            if slot is not None and 0 <= round_ - slot[2] < num_microbatches:
                stage, kind, delay = slot
                order.append(Action(stage, kind, round_ - delay))
                if kind == "I":
                    pending.append(Action(stage, "W", round_ - delay))
            elif done < len(pending):
                order.append(pending[done])
                done += 1
    return (*order, *pending[done:])
