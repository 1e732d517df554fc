"""Communication of a rank that runs in a process: collectives over mesh axes, and messages between stages.

There are two orders of addition. "rank": ranks exchange their parts, and each adds what it has from left to right in the order of
ranks, with the same bits as the simulation. "library": the backend adds, which NCCL does in the switch or the copy engines.

There are two transports for the order "rank", with the same bits. "shared": memory that the ranks of one machine share, for CPU
tensors. "backend": torch.distributed; on gloo by exchanges that use both directions of a link (`_both_ways.py`).
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.collectives import fold
from mpar.errors import MeshError
from mpar.ir import Message
from mpar.mesh import Mesh
from mpar.runtime.comm._aside import Aside, aside_of
from mpar.runtime.comm._both_ways import post_exchange, post_shift
from mpar.runtime.comm._channels import Channels
from mpar.runtime.comm._protocol import Posted
from mpar.runtime.comm._shared_mail import MAIL_BYTES
from mpar.runtime.comm._shared_memory import SharedGroup, connect
from mpar.runtime.comm._shared_posts import packed_bytes

__all__ = ["Counter", "ProcessComm"]


class Counter:
    """Records every collective and message: (op, axes, number of tensors, bytes that this rank contributed), in order."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, tuple[str, ...], int, int]] = []

    def add(self, op: str, axes: tuple[str, ...], tensors: Sequence[Tensor]) -> None:
        """Record one collective or message."""
        self.messages.append((op, axes, len(tensors), sum(t.nbytes for t in tensors)))

    def of_thread(self) -> "Counter":
        """The counter of collectives of another thread than the caller's."""
        return self


class ProcessComm:
    """Collectives and messages of this process's rank. Making one creates the groups over the axes `uses` and those for
    `messages` between stages, on all ranks in the same order.

    posted:    bytes of the longest message that is posted over each tuple of axes; posts over other axes use the backend.
    timeout_s:  how long a rank waits for others in groups that are made; None: as long as torch.distributed does by default.
    own_groups: no group is shared with another ProcessComm, so that both can be used at the same time.
    transport: "backend", "shared", or None: shared memory for every group whose ranks are all on one machine.
    Raises MeshError if the number of processes is not that of the ranks of the mesh, or if `transport` is "shared" and the
    ranks of a group share no memory.
    """

    def __init__(
        self,
        mesh: Mesh,
        uses: Iterable[tuple[str, ...]],
        *,
        order: str = "rank",
        counter: Counter | None = None,
        transport: str | None = None,
        messages: Sequence[Message] = (),
        posted: Mapping[tuple[str, ...], int] | None = None,
        device: torch.device | str = "cpu",
        own_groups: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != mesh.size:
            raise MeshError(
                f"cannot bind {mesh} of {mesh.size} ranks: {world} processes are running.\n"
                f"Start {mesh.size} processes, or choose mesh sizes whose product is {world}."
            )
        self.mesh, self.rank, self.order, self.counter = mesh, rank, order, counter
        self._device = torch.device(device)
        self._aside: Aside | None = None
        self._index: dict[tuple[str, ...], int] = {("pp",): mesh.index(rank, ("pp",))}
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        patience = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        self._is_gloo = dist.get_backend() == "gloo"
        for axes in sorted(set(uses)):
            self._join_group(axes, patience, own_groups=own_groups)
        self._channels = Channels(mesh, rank, messages, grouped=not self._is_gloo, patience=patience, device=self._device)
        self._shared: dict[tuple[str, ...], SharedGroup] = {}
        if order == "rank" and transport != "backend":
            groups = [mesh.group(rank, axes) for axes in self._groups]
            longest = [(posted or {}).get(axes, 0) for axes in self._groups]
            shared_groups, self._channels.mail = connect(groups, self._channels.letters(), longest)
            self._shared = {axes: group for axes, group in zip(self._groups, shared_groups, strict=True) if group is not None}
            apart = [axes for axes in self._groups if axes not in self._shared]
            if transport == "shared" and messages and self._channels.mail is None:
                raise MeshError(
                    f"transport='shared': rank {rank} cannot send its messages to other stages through shared memory: they are "
                    f"on other machines, or a rank sends more than {MAIL_BYTES:,} bytes in a step.\n"
                    "Leave transport out: messages then use the fastest transport that is available."
                )
            if transport == "shared" and apart:
                raise MeshError(
                    f"transport='shared': rank {rank} shares no memory with its groups over {apart}: some of their ranks are on "
                    "other machines or in other containers.\nLeave transport out: each group then uses the fastest that it has."
                )

    def _join_group(self, axes: tuple[str, ...], patience: datetime.timedelta | None, *, own_groups: bool) -> None:
        """Make all groups over `axes`, and remember the one that this rank is in."""
        assert axes == self.mesh.ordered(axes), f"ranks of a group are in mesh order, {axes} are not"
        self._index[axes] = self.mesh.index(self.rank, axes)
        for members in self.mesh.groups(axes):
            all_ranks = len(members) == self.mesh.size and not own_groups
            group = dist.group.WORLD if all_ranks else dist.new_group(list(members), timeout=patience)
            if self.rank in members:
                assert group is not None
                self._groups[axes] = group

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's index in its group over `axes`."""
        return self._index[axes]

    def over_network(self, uses: Iterable[tuple[str, ...]]) -> bool:
        """Whether torch.distributed carries all collectives over these axes, not shared memory."""
        return not any(axes in self._shared for axes in uses)

    def all_gather(self, x, *, posted=False, **how):
        """Shards of the group, concatenated along `dim`."""
        return self._run(self._all_gather, x, how, posted=posted)

    def reduce_scatter(self, x, *, posted=False, **how):
        """This rank's part along `dim` of the sum."""
        return self._run(self._reduce_scatter, x, how, posted=posted)

    def all_reduce(self, x, *, posted=False, **how):
        """The sum or maximum over the group; results of a list are views of one buffer."""
        return self._run(self._all_reduce, x, how, posted=posted)

    def all_to_all(self, x, *, posted=False, **how):
        """From sharded along `src` to sharded along `dst`."""
        return self._run(self._all_to_all, x, how, posted=posted)

    def _run(self, collective, x, how, *, posted):
        """Run a collective now, or beside the caller if it is only posted. Shared memory has nothing to wait for but other ranks,
        so posting there means running it."""
        if not posted:
            self._settle()
            return collective(x, **how)
        if how["axes"] in self._shared:
            return Posted(_as_list(collective(x, **how)), (), ())
        if self._aside is None:
            self._aside = aside_of(self._device)
        return self._aside.post(lambda: _as_list(collective(x, **how)), _as_list(x))

    def _settle(self) -> None:
        if self._aside is not None:
            self._aside.settle()

    def _all_gather(self, x, *, axes, dim, size):
        many = isinstance(x, list)
        xs, dims = (x, dim) if many else ([x], [dim])
        self._count("all_gather", axes, xs)
        shared = self._shared.get(axes)
        if shared is not None:
            outs = shared.all_gather(xs, dims)
            return outs if many else outs[0]
        flat = _pack(xs)
        received = self._gather(flat, axes, size)
        out, offset = [], 0
        for part, d in zip(xs, dims, strict=True):
            rows = received[:, offset : offset + part.numel()].view(size, *part.shape)
            offset += part.numel()
            out.append(_joined(rows, d))
        return out if many else out[0]

    def _reduce_scatter(self, x, *, axes, dim, size):
        many = isinstance(x, list)
        xs, dims = (x, dim) if many else ([x], [dim])
        self._count("reduce_scatter", axes, xs)
        chunks = [_chunks(part, d, size) for part, d in zip(xs, dims, strict=True)]
        shared = self._shared.get(axes)
        if shared is not None:
            outs = [chunk.new_empty(chunk.shape[1:]) for chunk in chunks]
            shared.reduce_scatter(chunks, outs)
            return outs if many else outs[0]
        send = chunks[0].reshape(size, -1) if len(chunks) == 1 else torch.cat([chunk.reshape(size, -1) for chunk in chunks], 1)
        if self.order == "library":
            total = send.new_empty(send.shape[1])
            dist.reduce_scatter_tensor(total, send.contiguous().view(-1), group=self._groups[axes])
            rows = [total]
        else:
            received = self._exchange(send, axes)
            rows = list(received.unbind(0))
        out, offset = [], 0
        for chunk in chunks:
            shape, count = chunk.shape[1:], chunk[0].numel()
            parts = [row[offset : offset + count].view(shape) for row in rows]
            out.append(fold(parts) if len(parts) > 1 else parts[0].clone())
            offset += count
        return out if many else out[0]

    def _all_reduce(self, x, *, axes, op, size):
        many = isinstance(x, list)
        xs = x if many else [x]
        self._count("all_reduce", axes, xs)
        shared = self._shared.get(axes)
        flat = _pack(xs, copy=True) if shared is None else xs[0].new_empty(sum(part.numel() for part in xs))
        if shared is not None:
            shared.all_reduce(xs, flat, op)
        elif self.order == "library" or size == 2:  # two summands have the same sum in either order
            dist.all_reduce(flat, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self._groups[axes])
        elif flat.numel() < 256 * size:  # short: one exchange of everything costs less than two exchanges of parts
            flat = fold(self._gather(flat, axes, size).unbind(0), op)
        else:
            flat = self._reduce_parts(flat, axes, size, op)
        if not many:
            return flat.view(x.shape)
        pieces = flat.split([part.numel() for part in xs])
        return [piece.view(part.shape) for piece, part in zip(pieces, xs, strict=True)]

    def _all_to_all(self, x, *, axes, src, dst, size):
        self._count("all_to_all", axes, [x])
        chunks = _chunks(x, dst, size)
        shared = self._shared.get(axes)
        if shared is not None:
            out = x.new_empty([n * size if i == src else n // size if i == dst else n for i, n in enumerate(x.shape)])
            shared.scatter([chunks], [_chunks(out, src, size)])
            return out
        chunks = chunks.contiguous()
        received = self._exchange(chunks.view(size, -1), axes).view(chunks.shape)
        return _joined(received, src)

    def shift(self, xs, *, axes, size):
        """Post `xs` to the next rank along `axes`, and buffers for the `xs` of the previous one."""
        self._settle()
        self._count("shift", axes, xs)
        shared = self._shared.get(axes)
        if shared is not None and shared.posts.fits(packed_bytes(xs)):
            values = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs)
            return Posted(values, [shared.posts.shift(xs, values)], ())
        group, sent = self._groups[axes], [x.contiguous() for x in xs]
        values = tuple(torch.empty_like(x) for x in sent)
        if self._is_gloo:
            return Posted(values, post_shift(group, sent, values), sent)
        members = self.mesh.group(self.rank, axes)
        following, before = members[(self._index[axes] + 1) % size], members[self._index[axes] - 1]
        ops = [dist.P2POp(dist.irecv, value, before, group) for value in values]
        ops += [dist.P2POp(dist.isend, x, following, group) for x in sent]
        return Posted(values, dist.batch_isend_irecv(ops), sent)

    def exchange_rows(self, xs, sent, received, *, axes, size, num_rows):
        """Post rows of `xs[0]` to every rank of the group: the first `sent[0]` to the first, and so on."""
        self._settle()
        num_sent, num_received = torch.stack([sent, received]).tolist()  # the host waits for the device once
        rows = xs[0][: sum(num_sent)].contiguous()
        self._count("exchange_rows", axes, [rows])
        shape = (sum(num_received) if num_rows is None else num_rows, *rows.shape[1:])
        value = rows.new_empty(shape)
        value[sum(num_received) :] = 0
        shared = self._shared.get(axes)
        if shared is not None and shared.posts.fits():
            parts = value[: sum(num_received)].split(num_received)
            return Posted((value,), [shared.posts.exchange(rows, num_sent, num_received, parts)], ())
        filled = value[: sum(num_received)]
        if self._is_gloo:
            works = post_exchange(self._groups[axes], rows.split(num_sent), filled.split(num_received))
        else:
            works = [dist.all_to_all_single(filled, rows, num_received, num_sent, group=self._groups[axes], async_op=True)]
        return Posted((value,), works, [rows])

    def arrived(self, posted, sent):
        """Wait for a posted collective and return its results."""
        for work in posted.works:
            work.wait()
        return tuple(posted.values)

    def send(self, x, *, peer, message, kind):
        """Post a message to the rank at position `peer` along pp; `x` must not change until `wait`."""
        self._count("send", ("pp",), [x])
        self._channels.send(x, peer, message, kind)

    def receive(self, buffer, *, peer, message, kind):
        """Post a buffer for a message; it may not be read until `wait`."""
        self._channels.receive(buffer, peer, message, kind)

    def wait(self, message):
        """Wait until the message is done."""
        self._channels.wait(message)

    def _reduce_parts(self, flat: Tensor, axes: tuple[str, ...], size: int, op: str) -> Tensor:
        """An all_reduce in two exchanges: each rank adds up one part, and then all ranks gather the parts."""
        count = flat.numel()
        width = -(-count // size)
        padded = flat if width * size == count else torch.nn.functional.pad(flat, (0, width * size - count))
        part = fold(self._exchange(padded.view(size, width), axes).unbind(0), op)
        total = self._gather(part, axes, size).view(-1)
        return total if width * size == count else total[:count].clone()

    def _gather(self, flat: Tensor, axes: tuple[str, ...], size: int) -> Tensor:
        out = flat.new_empty(size, flat.numel())
        if self._is_gloo and size == 2:  # among four, gloo's own ring loses less (bench/results/README.md)
            _wait_for(post_exchange(self._groups[axes], [flat] * size, out.unbind(0)))
        else:
            dist.all_gather_into_tensor(out.view(-1), flat, group=self._groups[axes])
        return out

    def _exchange(self, send: Tensor, axes: tuple[str, ...]) -> Tensor:
        send = send.contiguous()
        received = torch.empty_like(send)
        if self._is_gloo:
            _wait_for(post_exchange(self._groups[axes], send.unbind(0), received.unbind(0)))
        else:
            dist.all_to_all_single(received, send, group=self._groups[axes])
        return received

    def _count(self, op: str, axes: tuple[str, ...], xs: list[Tensor]) -> None:
        if self.counter is not None:
            self.counter.add(op, axes, xs)


def _as_list(x: Tensor | list[Tensor]) -> list[Tensor]:
    return x if isinstance(x, list) else [x]


def _wait_for(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def _chunks(x: Tensor, dim: int, size: int) -> Tensor:
    """`size` equal parts along `dim`, as a new first dim; a view."""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _pack(xs: list[Tensor], *, copy: bool = False) -> Tensor:
    """All elements in one flat tensor; with `copy` always a new one."""
    if len(xs) > 1:
        return torch.cat([x.reshape(-1) for x in xs])
    flat = xs[0].reshape(-1)
    return flat.clone() if copy and flat.data_ptr() == xs[0].data_ptr() else flat.contiguous()


def _joined(rows: Tensor, dim: int) -> Tensor:
    """The concatenation of `rows`, of shape (n, *shape), along `dim`; contiguous."""
    if dim == 0 and rows.is_contiguous():
        return rows.flatten(0, 1)
    return torch.cat(rows.unbind(0), dim)
