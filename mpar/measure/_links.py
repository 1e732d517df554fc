"""Links: how fast ranks of one machine exchange values, from a short and a long gather and reduction."""

from collections.abc import Callable, Iterator

import torch

from mpar.measure._timing import seconds_of
from mpar.mesh import Mesh
from mpar.runtime import ProcessComm

__all__ = ["measure_links"]

_AXES = ("dp",)
_SHORT = 256
_LONG = {"cpu": 2**20, "cuda": 2**26}


def measure_links(size: int, device: torch.device, transport: str | None) -> Iterator[tuple[str, float]]:
    """(name of a rate, its value) for links among `size` ranks, as `Hardware` defines them.

    transport: as of ProcessComm: None is what training uses.
    """
    comm = ProcessComm(Mesh(dp=size), [_AXES], transport=transport, device=device)

    def gather(elements: int) -> Callable[[], object]:
        x = torch.ones(elements, device=device)
        return lambda: comm.all_gather(x, axes=_AXES, dim=0, size=size)

    def reduce(elements: int) -> Callable[[], object]:
        x = torch.ones(elements * size, device=device)
        return lambda: comm.reduce_scatter(x, axes=_AXES, dim=0, size=size)

    short, long = _SHORT, _LONG[device.type]
    latency = rate = 0.0
    for collective in (gather, reduce):
        # all ranks must make the same number of calls, so that number is fixed
        few, many = _fixed(collective(short), 200, device), _fixed(collective(long), 10, device)
        latency += few / 2
        rate += 4 * (long - short) * (size - 1) / max(many - few, 1e-9) / 2
    yield "link_latency_s", latency
    yield "link_bytes_per_s", rate


def _fixed(call: Callable[[], object], number: int, device: torch.device) -> float:
    """Seconds of one call, of `number` calls in each of five loops."""

    def loop() -> None:
        for _ in range(number):
            call()

    return seconds_of(loop, device, budget_s=0.0) / number
