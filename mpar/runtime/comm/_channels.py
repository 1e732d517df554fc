"""Channels: how messages between stages are sent with torch.distributed.

Every message belongs to a channel: a sending position along pp, a receiving one, and a kind: F for activations, B for their
gradients, G for gradients of shared parameters. gloo matches messages by tag, so all channels share the default group. NCCL
ignores tags and runs what is posted on a communicator in order: there each channel has a group of its two ranks, so that no
channel waits for another. Between CPU ranks of one machine messages go through shared memory instead (`_shared_mail.py`).
"""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.ir import Message
from mpar.mesh import Mesh
from mpar.runtime.comm._shared_mail import Letter, SharedMail

__all__ = ["Channels"]


class Channels:
    """The channels of this process's rank. All ranks must make them, in the same order of collectives.

    grouped: whether each channel has a group, which is warmed up with one element; else messages have tags on the default group.
    patience: how long a group waits; None: as long as groups do by default.
    mail:    set if all ranks of this pipeline share memory: messages then go through it.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        messages: Sequence[Message],
        *,
        grouped: bool,
        device: torch.device,
        patience: datetime.timedelta | None = None,
    ) -> None:
        coordinates, self.position = mesh.coordinates(rank), mesh.index(rank, ("pp",))
        self._ranks = [mesh.rank({**coordinates, "pp": i}) for i in range(mesh.axis_size("pp"))]
        self._messages = messages
        self._groups: dict[tuple[int, int, str], dist.ProcessGroup] = {}
        self.mail: SharedMail | None = None
        self._works: dict[int, tuple[dist.Work, Tensor]] = {}  # message -> what to wait for, the tensor it reads or fills
        for channel in sorted({message.channel for message in messages}) if grouped else ():
            source, target, _ = channel
            for ranks in mesh.groups(("pp",)):  # all ranks make all groups, so that their names in torch agree
                group = dist.new_group([ranks[source], ranks[target]], timeout=patience)
                if rank in (ranks[source], ranks[target]):
                    assert group is not None
                    self._groups[channel] = group
                    self._warm_up(channel, device)

    def letters(self) -> list[Letter]:
        """The messages with ranks instead of positions, for shared memory."""
        return [Letter(m.number, self._ranks[m.source], self._ranks[m.target], m.bytes) for m in self._messages]

    def _warm_up(self, channel: tuple[int, int, str], device: torch.device) -> None:
        source, target, _ = channel
        one = torch.ones(1, device=device)
        if self.position == source:
            dist.send(one, self._ranks[target], group=self._groups[channel])
        else:
            dist.recv(one, self._ranks[source], group=self._groups[channel])

    def send(self, x: Tensor, peer: int, message: int, kind: str) -> None:
        """Post a message to the rank at position `peer`; `x` must not change until `wait`."""
        if self.mail is not None:
            self.mail.send(x, message)
            return
        x = x.contiguous()
        group = self._groups.get((self.position, peer, kind))
        work = dist.isend(x, self._ranks[peer], group=group, tag=0 if group is not None else message)
        assert work is not None
        self._works[message] = (work, x)

    def receive(self, buffer: Tensor, peer: int, message: int, kind: str) -> None:
        """Post a buffer for a message; it may not be read until `wait`."""
        if self.mail is not None:
            self.mail.receive(buffer, message)
            return
        group = self._groups.get((peer, self.position, kind))
        work = dist.irecv(buffer, self._ranks[peer], group=group, tag=0 if group is not None else message)
        assert work is not None
        self._works[message] = (work, buffer)

    def wait(self, message: int) -> None:
        """Wait until the message is done."""
        if self.mail is not None:
            self.mail.wait(message)
            return
        work, _ = self._works.pop(message)
        work.wait()
