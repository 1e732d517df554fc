"""1F1B: as few forwards as keep the pipeline busy, then forwards and backwards in turn."""

from collections.abc import Sequence

from mpar.schedules._action import Action
from mpar.schedules._sizes import check_sizes

__all__ = ["alternate", "one_f_one_b"]


def one_f_one_b(
    rank: int, *, num_ranks: int, num_microbatches: int, extra_warmup: int = 0, forwards_ahead: int = 0
) -> tuple[Action, ...]:
    """1F1B without interleaving (Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2.1).

    Keeps at most min(num_ranks - rank, num_microbatches) microbatches live on `rank`. Bubble (num_ranks - 1) (F + B).
    forwards_ahead: every rank does this many more forwards before its first backward. With 1, no backward follows the forward of
    its own microbatch, not on the last rank either.
    extra_warmup: for each rank after it, a rank does this many more forwards before its first backward. With 1, messages across
    each boundary and back may take as long as F + B, and up to 2 num_ranks - 1 microbatches are live. Rank 2 of 4, with 6:
        2F0  2F1 2B0  2F2 2B1  2F3 2B2  2F4 2B3  2F5 2B4  2B5
    """
    extra = {"extra_warmup": extra_warmup, "forwards_ahead": forwards_ahead}
    rules = {f"{name} is {number}, needs to be 0 or more": number >= 0 for name, number in extra.items()}
    check_sizes("one_f_one_b", rank, num_ranks, num_microbatches, rules=rules)
    forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
    backwards = [Action(rank, "B", m) for m in range(num_microbatches)]
    return alternate(forwards, backwards, (1 + extra_warmup) * (num_ranks - 1 - rank) + forwards_ahead)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards (or all, if there are fewer), then forwards and backwards in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])
