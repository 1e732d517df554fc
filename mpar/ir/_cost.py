"""Cost: the seconds that a segment and its collectives are predicted to take on given hardware."""

import functools

from mpar.hardware import Hardware
from mpar.ir._kind import CollectiveUse, Kind
from mpar.ir._op_time import op_time
from mpar.mesh import Mesh

__all__ = ["collective_time", "exposed_time", "link", "segment_time"]


def segment_time(kind: Kind, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of a segment: its ops run one after the other, and its messages travel one after the other from when they are
    posted. Ops are slower while a message travels, by `hardware.contention`."""
    now = links = 0.0  # when computation goes on, and when the links are free
    arrivals: dict[int, float] = {}
    for stretch in kind.stretches:
        now = max([now, *(arrivals[i] for i in stretch.awaits)])
        alone = sum(op_time(use, hardware) for use in stretch.ops)
        beside = min(alone, max(0.0, links - now) / (1 + hardware.contention))
        now += alone + beside * hardware.contention
        for i in stretch.posts:
            arrivals[i] = links = max(now, links) + collective_time(mesh, kind.collectives[i], hardware)
    return now


def exposed_time(kind: Kind, mesh: Mesh, hardware: Hardware) -> float:
    """The seconds that a segment's collectives add to its computation, which hides the rest of their messages."""
    return segment_time(kind, mesh, hardware) - sum(op_time(use, hardware) for use in kind.ops)


def collective_time(mesh: Mesh, use: CollectiveUse, hardware: Hardware) -> float:
    """Seconds of a collective of n ranks, k of them on each node that they are on.

    Gathers and reductions are rings of n - 1 rounds: (n - 1) / n of all bytes go through the link of each rank, twice for an
    all_reduce, and as many rings as a node has links to others leave it, so that k links between nodes carry what one within a
    node does. Of an all_to_all, (n - k) / n of what a rank brings leave its node. A shift sends its bytes once.
    """
    n, k = use.size, _ranks_on_a_node(mesh, use.axes, hardware.ranks_per_node)
    rate, latency = link(hardware, crosses=k < n)
    if use.op == "shift":
        return latency + use.bytes / rate
    if use.op in ("all_to_all", "exchange_rows"):
        within, between = use.bytes * (k - 1) / n, use.bytes * (n - k) / n
        return latency + max(within / hardware.link_bytes_per_s, between / hardware.cross_bytes_per_s)
    rate = min(hardware.link_bytes_per_s, k * rate)
    total_bytes = use.bytes * n if use.op == "all_gather" else use.bytes
    if use.op == "all_reduce":
        return latency + 2 * total_bytes * (n - 1) / n / rate  # short ones take a tree of few hops
    return latency + (n - 1) * hardware.hop_s + total_bytes * (n - 1) / n / rate


@functools.lru_cache(maxsize=1024)
def _ranks_on_a_node(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> int:
    """How many of the ranks that communicate with rank 0 over `axes` are on its node, rank 0 included."""
    return sum(rank < ranks_per_node for rank in mesh.group(0, axes))


def link(hardware: Hardware, *, crosses: bool) -> tuple[float, float]:
    """(bytes per second, latency in seconds) of a rank's link: between nodes if the message `crosses` nodes, else within one."""
    if crosses:
        return hardware.cross_bytes_per_s, hardware.cross_latency_s
    return hardware.link_bytes_per_s, hardware.link_latency_s
