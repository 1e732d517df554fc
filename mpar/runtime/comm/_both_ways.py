"""Exchanges over gloo that use both directions of a link at once.

gloo's own all_to_all sends first and receives then: on two ranks a link may be idle in one direction at any time, and it takes up
to twice as long as its bytes need (`python -m bench.slow_links wire`, bench/results/README.md). Here every receive is posted
before the first send. Peers are taken in turn from the next rank on, so that at no time all ranks send to the same one.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

__all__ = ["post_exchange", "post_shift"]

_FIRST_TAG = 1 << 30
"""Messages between stages have the tags below. gloo matches messages of two ranks with the same tag in order."""


def post_exchange(group: dist.ProcessGroup, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
    """Post the exchange of `sent[i]`, for rank i of the group, and of `received[i]`, which that rank fills; all contiguous, of
    equal sizes on both. What this rank sends to itself is copied at once.
    """
    index, size = group.rank(), group.size()
    received[index].copy_(sent[index])
    peers = [(index + turn) % size for turn in range(1, size)]
    works = [group.recv([received[peer]], peer, _FIRST_TAG) for peer in reversed(peers) if received[peer].numel()]
    return works + [group.send([sent[peer]], peer, _FIRST_TAG) for peer in peers if sent[peer].numel()]


def post_shift(group: dist.ProcessGroup, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
    """Post all of `sent` to the next rank of the group, and all of `received` from the one before."""
    index, size = group.rank(), group.size()
    works = [group.recv([x], (index - 1) % size, _FIRST_TAG + 1) for x in received]
    return works + [group.send([x], (index + 1) % size, _FIRST_TAG + 1) for x in sent]
