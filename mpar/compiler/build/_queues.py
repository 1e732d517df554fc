"""On which queue an instruction runs: work on one queue is done in order, queues beside each other."""

__all__ = ["channel", "queue_of"]

_QUEUES = {"gather": "gather", "reduce": "reduce", "offload": "host", "fetch": "host"}


def queue_of(op: str) -> str:
    """The queue of an instruction that is no message."""
    return _QUEUES.get(op, "compute")


def channel(op: str, peer: int, kind: str) -> str:
    """The queue of a message's end, such as `->1 F`: its direction, the other end's position along pp, and its kind."""
    return f"{'->' if op == 'send' else '<-'}{peer} {kind}"
