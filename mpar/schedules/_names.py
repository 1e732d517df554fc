"""The schedules by name, for configurations: what each one needs, and its order for all ranks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from mpar.errors import ConfigError, UnknownNameError
from mpar.schedules._action import Action
from mpar.schedules._collector import paused_collector
from mpar.schedules._dual_pipe import dual_pipe
from mpar.schedules._dual_pipe_v import dual_pipe_v
from mpar.schedules._forward_only import forward_only
from mpar.schedules._gpipe import gpipe
from mpar.schedules._interleaved import interleaved
from mpar.schedules._looped_bfs import looped_bfs
from mpar.schedules._one_f_one_b import one_f_one_b
from mpar.schedules._sizes import check_sizes
from mpar.schedules._v_half import v_half
from mpar.schedules._v_min import v_min
from mpar.schedules._zbv import zbv
from mpar.schedules._zero_bubble import zb1p, zb_h1, zb_h2

__all__ = ["SCHEDULES", "NamedOrder", "actions"]

_SIZES = ("rank", "num_ranks", "num_chunks", "num_microbatches")


@dataclass(frozen=True)
class NamedOrder:
    """One way to order the work of a pipeline.

    function: gives its order on one rank, or, if it has no parameter `rank`, a list with the orders of all ranks.
    chunks: stages of each rank, unless another number is asked for. any_chunks: whether other numbers are possible.
    placement: "loop": chunk c of rank r is stage c * num_ranks + r. "v": rank r has stages r and 2 num_ranks - 1 - r.
        "bidirectional": rank r has stage r for the first half of the microbatches, num_ranks - 1 - r for the second.
    line: its properties in one line, for help texts.
    """

    function: Callable[..., object]
    chunks: int
    any_chunks: bool
    placement: str
    line: str

    @property
    def allowed_chunks(self) -> tuple[int, ...] | None:
        """The numbers of chunks that are possible; None: any from 1 on."""
        return None if self.any_chunks else (self.chunks,)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the function's parameters other than the sizes."""
        return tuple(name for name in inspect.signature(self.function).parameters if name not in _SIZES)

    def table(self, num_ranks: int, num_chunks: int, num_microbatches: int, options: dict[str, object]) -> list[list[Action]]:
        """The order of every rank."""
        sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
        parameters = inspect.signature(self.function).parameters
        given = {name: size for name, size in sizes.items() if name in parameters} | options
        function: Callable = self.function
        ranks = [function(rank, **given) for rank in range(num_ranks)] if "rank" in parameters else function(**given)
        return [list(order) for order in ranks]


SCHEDULES: dict[str, NamedOrder] = {
    "gpipe": NamedOrder(gpipe, 1, False, "loop", "all forwards, then all backwards; memory grows with microbatches"),
    "one_f_one_b": NamedOrder(one_f_one_b, 1, False, "loop", "bubble of gpipe, at most num_ranks microbatches live"),
    "interleaved": NamedOrder(interleaved, 2, True, "loop", "1F1B in chunks: bubble / num_chunks, more messages and memory"),
    "looped_bfs": NamedOrder(looped_bfs, 2, True, "loop", "breadth first: each chunk's weights needed once per direction"),
    "zb_h1": NamedOrder(zb_h1, 1, False, "loop", "backward in two halves: memory of 1F1B, a third of its bubble"),
    "zb_h2": NamedOrder(zb_h2, 1, False, "loop", "no idling between first and last action, twice the memory of 1F1B"),
    "zb1p": NamedOrder(zb1p, 2, True, "loop", "zb_h1 in chunks: bubble / num_chunks"),
    "zbv": NamedOrder(zbv, 2, False, "v", "no idling between first and last action, memory of 1F1B on all ranks"),
    "v_half": NamedOrder(v_half, 2, False, "v", "about half the memory of 1F1B, half its bubble"),
    "v_min": NamedOrder(v_min, 2, False, "v", "a third of the memory of 1F1B, about two thirds of its bubble"),
    "dual_pipe": NamedOrder(dual_pipe, 1, False, "bidirectional", "forward and backward run as one; parameters twice"),
    "dual_pipe_v": NamedOrder(dual_pipe_v, 2, False, "v", "dual_pipe on one copy of the parameters"),
    "forward_only": NamedOrder(forward_only, 1, True, "loop", "evaluation; placement=v after training on a V"),
}


def actions(
    name: str, *, num_ranks: int, num_chunks: int | None = None, num_microbatches: int, **options: object
) -> list[list[Action]]:
    """The order of every rank by the schedule `name`, one of SCHEDULES.

    num_chunks: stages of each rank; None: the number that the schedule is made for. options: only those that its function has.
    Raises UnknownNameError, with similar names, for an unknown name; ConfigError for sizes or options that the schedule does not
    have.
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        near = get_close_matches(name, SCHEDULES, n=3, cutoff=0.4)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownNameError(f"no schedule is called {name!r}{meant} There are {', '.join(SCHEDULES)}")
    wrong = [
        f"it has no option {option!r} (its options: {', '.join(schedule.options) or 'none'})"
        for option in options
        if option not in schedule.options
    ]
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches} | (
        {} if num_chunks is None else {"num_chunks": num_chunks}
    )
    types = [f"{size}={value!r} is no whole number" for size, value in sizes.items() if type(value) is not int]
    for option, value in options.items():
        default = inspect.signature(schedule.function).parameters[option].default if option in schedule.options else value
        if type(value) not in ((int, type(None)) if default is None else (type(default),)):
            types.append(f"option {option}={value!r} is of another type than its default {default!r}")
    if types:
        raise ConfigError(f"schedule {name}: {'; '.join(wrong + types)}")
    chunks = schedule.chunks if num_chunks is None else num_chunks
    if schedule.allowed_chunks is not None and chunks not in schedule.allowed_chunks:
        others = ", ".join(other for other, entry in SCHEDULES.items() if entry.any_chunks and other != "forward_only")
        wrong.append(
            f"{num_chunks} chunks on {num_ranks} ranks are {chunks * num_ranks} stages, but it has {schedule.chunks} per rank, "
            f"{schedule.chunks * num_ranks} in all: leave num_chunks out, or use one of {others}"
        )
    check_sizes(name, 0, num_ranks, num_microbatches, chunks)
    if wrong:
        raise ConfigError(f"schedule {name}: {'; '.join(wrong)}")
    with paused_collector():
        return schedule.table(num_ranks, chunks, num_microbatches, options)
