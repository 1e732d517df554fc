"""Hardware for tests of what hides behind what: round numbers, and links that take about as long as computation."""

from mpar.hardware import Hardware

__all__ = ["BOX"]

BOX = Hardware(
    name="box",
    flops_per_s={"float32": 1e9},
    memory_bytes_per_s=1e9,
    memory_bytes=2**30,
    link_bytes_per_s=2e8,
    link_latency_s=1e-6,
    cross_bytes_per_s=1e8,
    cross_latency_s=1e-6,
    ranks_per_node=4,
    host_bytes_per_s=2e8,
)
