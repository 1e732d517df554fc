"""Zero-bubble schedules: gradients of inputs first, as others wait for them; gradients of weights where there is nothing else."""

from collections.abc import Sequence

from mpar.schedules._action import Action
from mpar.schedules._interleaved import chunk_order, groups_of
from mpar.schedules._sizes import check_sizes

__all__ = ["zb1p", "zb_h1", "zb_h2"]


def zb_h1(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241): the memory of 1F1B, a third of its bubble.

    Keeps at most num_ranks microbatches live. Bubble (num_ranks - 1) (F + I - W). Rank 2 of 4, with 4:
        2F0  2F1 2I0  2F2 2I1  2F3 2I2 2W0  2I3 2W1  2W2 2W3
    """
    check_sizes("zb_h1", rank, num_ranks, num_microbatches)
    return _late_weights(*_one_stage(rank, num_microbatches), warmup=num_ranks - 1 - rank, delay=rank)


def zb_h2(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """ZB-H2 (Qi et al. 2023, arXiv:2401.10241): twice the memory of 1F1B, and no bubble if F, I and W take the same time.

    Keeps at most 2 num_ranks - 1 microbatches live. Between a rank's first and last action it idles for
    (num_ranks - 1) (F + I - 2 W). Rank 2 of 3, with 6:
        2F0 2I0  2F1 2I1  2F2 2I2  2F3 2I3  2F4 2I4 2W0  2F5 2I5 2W1  2W2 2W3 2W4 2W5
    """
    check_sizes("zb_h2", rank, num_ranks, num_microbatches)
    return _late_weights(*_one_stage(rank, num_microbatches), warmup=2 * (num_ranks - 1 - rank), delay=2 * rank)


def zb1p(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> tuple[Action, ...]:
    """ZB-H1 on interleaved chunks: torch.distributed.pipelining's InterleavedZeroBubble; stage c * num_ranks + rank is chunk c.

    Groups of microbatches as in `interleaved`. Keeps at most num_chunks * num_ranks microbatches live, if num_ranks divides
    num_microbatches. Rank 1 of 2, 2 chunks, with 2:
        1F0 1F1  3F0 3I0  3F1 3I1 3W0  1I0 3W1  1I1 1W0  1W1
    """
    check_sizes("zb1p", rank, num_ranks, num_microbatches, num_chunks)
    groups = groups_of("zb1p", num_ranks, num_microbatches, group_size)
    forwards = chunk_order("F", rank, num_ranks, range(num_chunks), groups)
    inputs = chunk_order("I", rank, num_ranks, range(num_chunks - 1, -1, -1), groups)
    weights = chunk_order("W", rank, num_ranks, range(num_chunks - 1, -1, -1), groups)
    warmup = (num_chunks - 1) * len(groups[0]) + num_ranks - 1 - rank
    return _late_weights(forwards, inputs, weights, warmup=warmup, delay=rank)


def _one_stage(stage: int, num_microbatches: int) -> list[list[Action]]:
    return [[tuple.__new__(Action, (stage, kind, m)) for m in range(num_microbatches)] for kind in "FIW"]


def _late_weights(
    forwards: Sequence[Action], inputs: Sequence[Action], weights: Sequence[Action], *, warmup: int, delay: int
) -> tuple[Action, ...]:
    """`warmup` forwards; then F, I in turn, from the `delay`-th I on each with the oldest W that is left; then the other W."""
    warmup, delay = min(warmup, len(forwards)), min(delay, len(weights))
    order = list(forwards[:warmup])
    for k, action in enumerate(inputs):
        order += forwards[warmup + k : warmup + k + 1]
        order.append(action)
        if k >= delay:
            order.append(weights[k - delay])
    return (*order, *weights[len(weights) - delay :])
