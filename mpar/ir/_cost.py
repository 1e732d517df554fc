"""Cost: seconds of a segment and of its collectives on a hardware profile."""

import torch

from mpar.hardware import Hardware
from mpar.ir._kind import CollectiveUse, Kind
from mpar.mesh import Mesh

__all__ = ["collective_time", "link", "segment_time"]


def segment_time(kind: Kind, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of a segment: the larger of arithmetic and memory traffic, then what of its collectives nothing hides."""
    dtypes = (dtype for _, dtype in kind.operands if dtype.is_floating_point)
    narrow = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    rate = hardware.flops_per_s.get(str(narrow).removeprefix("torch."), max(hardware.flops_per_s.values()))
    local = max(kind.flops / rate, kind.bytes / hardware.memory_bytes_per_s) + hardware.launch_s
    return local + sum(_exposed_time(mesh, use, hardware, rate) for use in kind.collectives)


def _exposed_time(mesh: Mesh, use: CollectiveUse, hardware: Hardware, rate: float) -> float:
    """Seconds of a collective that nothing hides."""
    hidden = max(use.hidden_flops / rate, use.hidden_bytes / hardware.memory_bytes_per_s)
    return max(0.0, collective_time(mesh, use, hardware) - hidden)


def collective_time(mesh: Mesh, use: CollectiveUse, hardware: Hardware) -> float:
    """Ring costs: (n - 1) / n of the whole message through one rank's link; twice that for an all_reduce."""
    rate, latency = link(hardware, crosses=_crosses_nodes(mesh, use.axes, hardware.ranks_per_node))
    n = use.size
    if use.op == "shift":
        return latency + use.bytes / rate
    whole = use.bytes * n if use.op == "all_gather" else use.bytes
    passes = 2 if use.op == "all_reduce" else 1
    return latency + passes * whole * (n - 1) / n / rate


def _crosses_nodes(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> bool:
    first = {axis: mesh.axis_size(axis) - 1 for axis in axes}
    return mesh.rank(first) // ranks_per_node > 0


def link(hardware: Hardware, *, crosses: bool) -> tuple[float, float]:
    """(bytes per second, latency) within a node or between nodes."""
    if crosses:
        return hardware.cross_bytes_per_s, hardware.cross_latency_s
    return hardware.link_bytes_per_s, hardware.link_latency_s
