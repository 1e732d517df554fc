"""Hardware: the rates of one device and its links. Each profile is a file of the configuration group `hardware`."""

import functools
from dataclasses import dataclass, field

import yaml

from mpar.conf_dir import conf_dir
from mpar.errors import UnknownNameError

__all__ = ["REFERENCE", "Hardware", "hardware"]

REFERENCE = "reference"
"""The default profile for which schedules are made: round numbers of a typical accelerator."""


@dataclass(frozen=True)
class Hardware:
    """The rates of one device and its links, as they are achieved, not those of the data sheet.

    flops_per_s:       FLOP/s of large products of matrices by the name of a dtype ("float32", "bfloat16").
    vector_flops_per_s: FLOP/s of all other ops but attention; 0: those of products.
    transcendentals_per_s: exponentials and the like in a second, in float32; 0: they take no time.
    attention_flops_per_s: of long sequences, by "forward" and "backward"; of passes that are not named, those of products.
    multiprocessors:   of a GPU: so many tiles of a product are computed at once; 0: no rate depends on shapes.
    wave_s:            the time between two such waves of tiles.
    memory_bytes_per_s: bandwidth of device memory.
    launch_s:          the fixed time that every op takes. op_launch_s: by primitive, of those that take another.
    host_bytes_per_s:  bandwidth between a device and the memory of its host.
    link_bytes_per_s, link_latency_s: one rank's share within a node; cross_*: the same between nodes of `ranks_per_node` ranks.
    memory_bytes:      memory of one device.
    op_factors:        by primitive, how often longer its work takes than all this says: it may read its operands twice.
    hop_s:             the time that each further rank adds to a gather or reduce_scatter, which pass through all of them.
    contention:        by what share computation is slower while a collective runs beside it.
    overlaps:          whether communication and copies run while the device computes.
    arch:              the chip for which kernels are chosen, such as "sm_90"; None is a CPU.
    """

    name: str
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    link_latency_s: float
    cross_bytes_per_s: float
    cross_latency_s: float
    ranks_per_node: int
    launch_s: float = 0.0
    peak_flops_per_s: float = 0.0
    arch: str | None = None
    overlaps: bool = True
    host_bytes_per_s: float = 5e10
    hop_s: float = 0.0
    contention: float = 0.0
    multiprocessors: int = 0
    wave_s: float = 0.0
    vector_flops_per_s: float = 0.0
    transcendentals_per_s: float = 0.0
    attention_flops_per_s: dict[str, float] = field(default_factory=dict)
    op_factors: dict[str, float] = field(default_factory=dict)
    op_launch_s: dict[str, float] = field(default_factory=dict)


@functools.cache
def hardware(name: str) -> Hardware:
    """The profile `conf/hardware/<name>.yaml`. Raises UnknownNameError with the list of profiles."""
    files = {file.stem: file for file in sorted((conf_dir() / "hardware").glob("*.yaml"))}
    if name not in files:
        raise UnknownNameError(f"no hardware profile is called {name!r}; there are {', '.join(files)}")
    return Hardware(**yaml.safe_load(files[name].read_text(encoding="utf-8")))
