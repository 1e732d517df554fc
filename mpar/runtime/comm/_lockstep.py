"""Lockstep: every rank of a mesh is a thread of this process; collectives and messages are copies in its memory."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mpar.collectives import combine
from mpar.errors import ProgramError
from mpar.mesh import Mesh

__all__ = ["LockstepComm", "run_ranks"]

T = TypeVar("T")
"""What the work of a rank returns."""


PATIENCE_S = 1800.0  # torch.distributed's own default: a simulated rank may compute for long between two collectives


class LockstepComm:
    """Collectives and messages of one simulated rank. All ranks of a simulation share one `_Hall`."""

    def __init__(self, mesh: Mesh, rank: int, hall: "_Hall") -> None:
        self.mesh, self.rank, self.hall = mesh, rank, hall
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's index in its group over `axes`."""
        return self.mesh.index(self.rank, axes)

    def all_gather(self, x, *, axes, dim, size, posted=False):
        """Shards of the group, concatenated along `dim`."""
        return _result(self._meet("all_gather", x, axes, dim=dim), posted)

    def reduce_scatter(self, x, *, axes, dim, size, posted=False):
        """This rank's part along `dim` of the sum."""
        return _result(self._meet("reduce_scatter", x, axes, dim=dim), posted)

    def all_reduce(self, x, *, axes, op, size, posted=False):
        """The sum or maximum over the group."""
        return _result(self._meet("all_reduce", x, axes, op=op), posted)

    def all_to_all(self, x, *, axes, src, dst, size, posted=False):
        """From sharded along `src` to sharded along `dst`."""
        return _result(self._meet("all_to_all", x, axes, src=src, dst=dst), posted)

    def shift(self, xs, *, axes, size):
        """The `xs` of the previous rank. A simulated rank waits for them now, not in `arrived`."""
        return self._meet("shift", (xs,), axes)

    def exchange_rows(self, xs, sent, received, *, axes, size, num_rows):
        """Rows from every rank of the group."""
        return self._meet("exchange_rows", (xs, sent, received), axes, num_rows=num_rows)

    def arrived(self, posted, sent):
        """The results of a posted collective."""
        return posted

    def send(self, x: Tensor, *, peer: int, message: int, kind: str) -> None:
        """Post a message to the rank at position `peer` along pp."""
        self.hall.post(message, self.rank, self._peer(peer), sent=x)

    def receive(self, buffer: Tensor, *, peer: int, message: int, kind: str) -> None:
        """Post a buffer for a message."""
        self.hall.post(message, self._peer(peer), self.rank, buffer=buffer)

    def wait(self, message: int) -> None:
        """Wait until the message is done."""
        self.hall.wait_for(message, self.rank)

    def _peer(self, position: int) -> int:
        return self.mesh.rank({**self.mesh.coordinates(self.rank), "pp": position})

    def _meet(self, kind: str, x: Any, axes: tuple[str, ...], **how: Any) -> Any:
        if axes not in self._groups:
            self._groups[axes] = self.mesh.group(self.rank, axes)
        return self.hall.meet(self.rank, self._groups[axes], kind, x, how)


def _result(value: Any, posted: bool) -> Any:
    """What a collective returns; if it is posted, what `arrived` returns: a tuple. A simulated rank has waited already."""
    return value if not posted else tuple(value) if isinstance(value, list) else (value,)


class _Hall:
    """Where simulated ranks meet: the last of a group to arrive computes what everybody gets."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: dict[tuple[int, ...], dict[int, tuple[str, Any]]] = {}
        self.results: dict[tuple[tuple[int, ...], int], Any] = {}
        self.failure: BaseException | None = None
        self.posted: dict[tuple[int, int, int], Tensor] = {}  # (message, from, to) -> the tensor of the end that came first
        self.done: set[tuple[int, int]] = set()  # (message, rank)

    def post(self, message: int, source: int, target: int, *, sent: Tensor | None = None, buffer: Tensor | None = None) -> None:
        """Post one end of a message. The second end to be posted copies the tensor."""
        with self.condition:
            other = self.posted.pop((message, source, target), None)
            if other is None:
                self.posted[message, source, target] = sent if sent is not None else cast(Tensor, buffer)
                return
            if sent is not None:
                other.copy_(sent)
            else:
                cast(Tensor, buffer).copy_(other)
            self.done |= {(message, source), (message, target)}
            self.condition.notify_all()

    def wait_for(self, message: int, rank: int) -> None:
        """Block `rank` until both ends of the message were posted."""
        with self.condition:
            while (message, rank) not in self.done and self.failure is None:
                if not self.condition.wait(timeout=PATIENCE_S):
                    self.fail(ProgramError(f"rank {rank} waited {PATIENCE_S} s for message {message}"))
            if self.failure is not None:
                raise ProgramError("another simulated rank failed") from self.failure
            self.done.remove((message, rank))

    def meet(self, rank: int, group: tuple[int, ...], kind: str, x: object, how: Mapping[str, object]) -> object:
        """The result of `rank` in a collective of `group`, once all members called this."""
        with self.condition:
            arrived = self.waiting.setdefault(group, {})
            arrived[rank] = (kind, x)
            if len(arrived) == len(group):
                kinds = {k for k, _ in arrived.values()}
                if len(kinds) > 1:
                    self.fail(
                        ProgramError(
                            f"ranks {group} meet with different collectives: { {r: k for r, (k, _) in arrived.items()} }"
                        )
                    )
                else:
                    self._hand_out(group, kind, [arrived[member][1] for member in group], how)
                del self.waiting[group]
                arrived.clear()  # this frame must not keep operands alive
                self.condition.notify_all()
            while (group, rank) not in self.results and self.failure is None:
                if not self.condition.wait(timeout=PATIENCE_S):
                    self.fail(
                        ProgramError(f"rank {rank} waited {PATIENCE_S} s for {group} in a {kind} that the others did not reach")
                    )
            if self.failure is not None:
                raise ProgramError("another simulated rank failed") from self.failure
            return self.results.pop((group, rank))

    def _hand_out(self, group: tuple[int, ...], kind: str, parts: list[Any], how: Mapping[str, Any]) -> None:
        """Compute a collective and leave each member its result."""
        if isinstance(parts[0], list) and kind == "all_reduce":  # as between processes: results are views of one buffer
            flat = combine(kind, [torch.cat([x.reshape(-1) for x in part]) for part in parts], **how)
            shapes = [x.shape for x in parts[0]]
            pieces = [buffer.split([shape.numel() for shape in shapes]) for buffer in flat]
            outs: list[Any] = [[p.view(shape) for p, shape in zip(split, shapes, strict=True)] for split in pieces]
        elif isinstance(parts[0], list):
            dims = how.get("dim", [None] * len(parts[0]))
            columns = [
                combine(kind, [p[i] for p in parts], **({**how, "dim": d} if d is not None else how)) for i, d in enumerate(dims)
            ]
            outs = [[column[i] for column in columns] for i in range(len(group))]
        else:
            outs = combine(kind, parts, **how)
        self.results |= {(group, member): out for member, out in zip(group, outs, strict=True)}

    def fail(self, error: BaseException) -> None:
        """Note the first error and wake all ranks, which then raise."""
        self.failure = self.failure or error
        self.condition.notify_all()


def run_ranks(mesh: Mesh, work: Callable[[int, LockstepComm], T]) -> list[T]:
    """Run `work(rank, comm)` for all ranks at the same time; the results by rank. Raises the first error of any rank."""
    hall = _Hall()
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(rank, LockstepComm(mesh, rank, hall))
        except BaseException as error:
            with hall.condition:
                hall.fail(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hall.failure is not None:
        raise hall.failure
    return [results[rank] for rank in range(mesh.size)]
