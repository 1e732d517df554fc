"""DualPipeV: the order of DualPipe on one copy of the model, placed as a V."""

from mpar.schedules._action import Action
from mpar.schedules._dual_pipe import two_ways
from mpar.schedules._sizes import check_sizes

__all__ = ["dual_pipe_v"]


def dual_pipe_v(rank: int, *, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """DualPipeV (github.com/deepseek-ai/DualPipe): stages `rank` and 2 num_ranks - 1 - rank on a rank.

    Where DualPipeV runs a forward and a backward as one, the forward comes first here. Needs at least twice as many microbatches
    as ranks. Keeps at most 2 num_ranks + 1 microbatches live, summed over both chunks. Rank 1 of 2, with 4:
        1F0 2F0 1F1 2F1  1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1  2B2 1B2 2I3 1I3  2W3 1W3
    """
    rules = {
        f"{num_microbatches} microbatches are fewer than 2 * {num_ranks} ranks = {2 * num_ranks}: use that many, "
        f"fewer ranks, or zbv": num_microbatches >= 2 * num_ranks
    }
    check_sizes("dual_pipe_v", rank, num_ranks, num_microbatches, 2, rules)
    return two_ways(rank, num_ranks, num_microbatches, (rank, 0), (2 * num_ranks - 1 - rank, 0))
