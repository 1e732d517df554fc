"""Token groups: a microbatch of B x S tokens, divided into g x h independent groups of neighbouring rows and positions.

Each group has capacities of its own (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2). Primitives take the size of a group
and not the number of groups, because a shard of whole groups has groups of the same size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.errors import ShapeError

__all__ = ["by_group", "check_group", "group_of_token", "group_sizes", "num_groups"]


def group_sizes(op: str, shape: Sequence[int], groups: Sequence[int]) -> list[int]:
    """`[rows, positions]`: the size of each group, if (B, S, ...) tokens are divided into `groups` = (g, h) groups.

    The rows, as they are stored, are divided into g equal parts, and the positions into h. Raises ShapeError if they cannot be.
    """
    wrong = [
        f"{count} does not divide the {size} {dim_name}"
        for dim_name, size, count in zip(("sequences", "positions of a sequence"), shape, groups, strict=False)
        if count < 1 or size % count
    ]
    if wrong or len(groups) != 2:
        raise ShapeError(
            f"{op}: cannot divide a microbatch of {' x '.join(map(str, shape[:2]))} tokens into token groups {tuple(groups)}: "
            + (" and ".join(wrong) or "there must be two numbers")
            + ".\nThe first number divides the sequences of a microbatch, the second their positions."
        )
    return [size // count for size, count in zip(shape, groups, strict=False)]


def check_group(op: str, shape: Sequence[int], group: Sequence[int]) -> None:
    """Raise ShapeError unless (B, S, ...) tokens are whole groups of `group` = [rows, positions]."""
    if len(group) != 2 or any(n % size if size else n for n, size in zip(shape, group, strict=False)):
        raise ShapeError(f"{op}: {tuple(shape[:2])} tokens cannot be divided into groups of {tuple(group)}")


def num_groups(shape: Sequence[int], group: Sequence[int]) -> tuple[int, int]:
    """(g, h): how many groups of `group` = [rows, positions] there are in (B, S, ...) tokens; one along dims of size zero."""
    g, h = (n // size if size else 1 for n, size in zip(shape, group, strict=False))
    return g, h


def group_of_token(shape: Sequence[int], group: Sequence[int], device: torch.device) -> Tensor:
    """(B, S): the group of each token, 0 to g * h - 1."""
    rows_B, positions_S = (torch.arange(n, device=device) // max(size, 1) for n, size in zip(shape, group, strict=False))
    return rows_B[:, None] * num_groups(shape, group)[1] + positions_S


def by_group(x: Tensor, group: Sequence[int]) -> Tensor:
    """(B, S, ...) as (g * h, tokens of a group, ...), with tokens in the order in which they are stored."""
    (g, h), (b, s) = num_groups(x.shape, group), group
    return x.reshape(g, b, h, s, *x.shape[2:]).transpose(1, 2).reshape(g * h, b * s, *x.shape[2:])
