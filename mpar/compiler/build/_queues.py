"""Queues: on which queue an instruction runs. Instructions of one queue run in order, different queues run at the same time."""

__all__ = ["channel", "queue_of"]

_QUEUES = {"gather": "gather", "reduce": "reduce", "offload": "host", "fetch": "host"}


def queue_of(op: str) -> str:
    """The queue of an instruction other than send and recv."""
    return _QUEUES.get(op, "compute")


def channel(op: str, peer: int, kind: str) -> str:
    """The queue of a send or recv, such as `->1 F`: the direction, the position of the peer, and the kind of the message."""
    return f"{'->' if op == 'send' else '<-'}{peer} {kind}"
