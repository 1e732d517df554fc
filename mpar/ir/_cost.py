"""Cost: the seconds that a segment and its collectives are predicted to take on given hardware."""

import torch

from mpar.hardware import Hardware
from mpar.ir._kind import CollectiveUse, Kind
from mpar.mesh import Mesh

__all__ = ["collective_time", "exposed_time", "link", "segment_time"]


def segment_time(kind: Kind, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of a segment: its arithmetic or its memory traffic, whichever is longer, and the time of its collectives that no
    computation hides. The rate of the arithmetic is that of the narrowest floating dtype among the operands."""
    compute_s = max(kind.flops / _rate(kind, hardware), kind.bytes / hardware.memory_bytes_per_s) + hardware.launch_s
    return compute_s + exposed_time(kind, mesh, hardware)


def exposed_time(kind: Kind, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of a segment's collectives that remain after the computation which runs while their messages are on the way."""
    rate, exposed = _rate(kind, hardware), 0.0
    for use in kind.collectives:
        hidden = max(use.hidden_flops / rate, use.hidden_bytes / hardware.memory_bytes_per_s)
        exposed += max(0.0, collective_time(mesh, use, hardware) - hidden)
    return exposed


def _rate(kind: Kind, hardware: Hardware) -> float:
    """FLOP/s in the narrowest floating dtype among the operands."""
    dtypes = (dtype for _, dtype in kind.operands if dtype.is_floating_point)
    narrowest = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    return hardware.flops_per_s.get(str(narrowest).removeprefix("torch."), max(hardware.flops_per_s.values()))


def collective_time(mesh: Mesh, use: CollectiveUse, hardware: Hardware) -> float:
    """Seconds of a collective as a ring of n ranks carries it out.

    (n - 1) / n of all bytes go through the link of each rank; an all_reduce goes round twice; a shift sends its bytes once.
    """
    rate, latency = link(hardware, crosses=_crosses_nodes(mesh, use.axes, hardware.ranks_per_node))
    n = use.size
    if use.op == "shift":
        return latency + use.bytes / rate
    total_bytes = use.bytes * n if use.op == "all_gather" else use.bytes
    num_rounds = 2 if use.op == "all_reduce" else 1
    return latency + num_rounds * total_bytes * (n - 1) / n / rate


def _crosses_nodes(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> bool:
    """Whether the ranks that communicate with rank 0 over `axes` reach beyond the first node."""
    last_of_group = {axis: mesh.axis_size(axis) - 1 for axis in axes}
    return mesh.rank(last_of_group) // ranks_per_node > 0


def link(hardware: Hardware, *, crosses: bool) -> tuple[float, float]:
    """(bytes per second, latency in seconds) of a rank's link: between nodes if the message `crosses` nodes, else within one."""
    if crosses:
        return hardware.cross_bytes_per_s, hardware.cross_latency_s
    return hardware.link_bytes_per_s, hardware.link_latency_s
