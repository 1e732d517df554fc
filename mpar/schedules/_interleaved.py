"""Interleaved 1F1B: several chunks of the model per rank, depth first."""

from mpar.schedules._action import Action
from mpar.schedules._one_f_one_b import alternate
from mpar.schedules._sizes import check_sizes

__all__ = ["chunk_order", "groups_of", "interleaved"]


def interleaved(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None, forwards_ahead: int = 0
) -> tuple[Action, ...]:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2.2); stage c * num_ranks + rank is chunk c.

    Microbatches go through the chunks in groups of about num_ranks, or of at most `group_size` (see `groups_of`). Keeps at most
    (num_chunks - 1) * group + 2 (num_ranks - 1 - rank) + 1 microbatches live, summed over its chunks. If num_ranks divides
    num_microbatches, the bubble is (num_ranks - 1) (F + B) of a chunk, 1 / num_chunks of that of 1F1B.
    forwards_ahead: every rank does this many more forwards before its first backward, as for `one_f_one_b`.
    Rank 1 of 2, 2 chunks, with 4:
        1F0 1F1  3F0 3B0  3F1 3B1  1F2 1B0  1F3 1B1  3F2 3B2  3F3 3B3  1B2 1B3
    """
    rules = {f"forwards_ahead is {forwards_ahead}, needs to be 0 or more": forwards_ahead >= 0}
    check_sizes("interleaved", rank, num_ranks, num_microbatches, num_chunks, rules)
    groups = groups_of("interleaved", num_ranks, num_microbatches, group_size)
    forwards = chunk_order("F", rank, num_ranks, range(num_chunks), groups)
    backwards = chunk_order("B", rank, num_ranks, range(num_chunks - 1, -1, -1), groups)
    warmup = (num_chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
    return alternate(forwards, backwards, warmup + forwards_ahead)


def groups_of(name: str, num_ranks: int, num_microbatches: int, group_size: int | None = None) -> list[range]:
    """The microbatches in groups that go through a chunk together. Groups are of nearly equal size, larger ones first.

    A group needs num_ranks microbatches: with fewer, the first rank would wait for the group to come back from the end of the
    first chunk. So there are at most num_microbatches // num_ranks groups (one if there are fewer microbatches than ranks). If
    `group_size` is None, there are that many; otherwise as few as keep groups at or below `group_size`, where this is possible.
    """
    smallest = min(num_ranks, num_microbatches)
    groups = max(1, num_microbatches // num_ranks)
    if group_size is not None:
        rule = (
            f"group_size is {group_size}, needs to be {smallest} or more, the smaller of num_ranks and num_microbatches, or None"
        )
        check_sizes(name, 0, num_ranks, num_microbatches, rules={rule: group_size >= smallest})
        groups = min(groups, -(-num_microbatches // group_size))
    size, larger = divmod(num_microbatches, groups)
    starts = [g * size + min(g, larger) for g in range(groups + 1)]
    return [range(starts[g], starts[g + 1]) for g in range(groups)]


def chunk_order(kind: str, rank: int, num_ranks: int, chunks: range, groups: list[range]) -> list[Action]:
    """The actions of one kind: every group, in order, goes through all of `chunks`, in order."""
    return [tuple.__new__(Action, (c * num_ranks + rank, kind, m)) for group in groups for c in chunks for m in group]
