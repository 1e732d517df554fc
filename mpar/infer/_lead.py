"""Lead and follow: the engine is in one process, rank 0, and its runner has a part in every rank. Rank 0 sends each call of its
runner to the others, which make the same call. A step without a long prompt is one broadcast.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.errors import ConfigError
from mpar.infer._engine import Runner
from mpar.infer._scheduler import Sizes
from mpar.infer._scores import Scores
from mpar.infer._tables import Tables

__all__ = ["Leader", "follow"]

_STEP, _SCORES, _PREPARE, _END = range(4)
_PATIENCE = datetime.timedelta(days=365)  # for the next call: nobody may ask for anything for a long time


class _Line:
    """Broadcasts from rank 0, in a group of their own, which has more patience than those of a program.

    A call begins with a message of fixed size: what is called, a count, and for a step its tables and as many tokens as there are
    rows. What does not fit follows.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._head = torch.zeros(2 + sizes.rows * (6 + sizes.row_pages), dtype=torch.int32)

    def send(self, call: int, count: int = 0) -> None:
        """Begin a call that has no tables."""
        self._head[:2] = torch.tensor([call, count])
        dist.broadcast(self._head, 0, self._group)

    def send_step(self, tables: Tables) -> None:
        """Call `Runner.step` with these."""
        rows, count = self.sizes.rows, len(tables.tokens_T)
        table_3T = torch.stack([tables.tokens_T, tables.order_T, tables.rows_T])
        self._head[2 : 2 + 3 * rows] = torch.cat([tables.last_R, tables.adapters_R, tables.greedy_R])
        self._head[2 + 3 * rows : -3 * rows] = tables.pages_RP.flatten()
        if count <= rows:
            self._head[-3 * rows :].view(3, rows)[:, :count] = table_3T
        self.send(_STEP, count)
        if count > rows:
            self.send_rest(table_3T)

    def send_rest(self, numbers: Tensor) -> None:
        """What follows: whole numbers whose count the other ranks know."""
        dist.broadcast(numbers.contiguous(), 0, self._group)

    def receive(self) -> tuple[int, int]:
        """What rank 0 calls, and a count."""
        dist.broadcast(self._head, 0, self._group)
        call, count = self._head[:2].tolist()
        return call, count

    def receive_step(self, count: int) -> Tables:
        """The tables of a step with so many tokens."""
        rows = self.sizes.rows
        last_R, adapters_R, greedy_R = self._head[2 : 2 + 3 * rows].long().view(3, rows)
        pages_RP = self._head[2 + 3 * rows : -3 * rows].view(rows, -1).long()
        first_3R = self._head[-3 * rows :].view(3, rows)
        table = self.receive_rest(3 * count).view(3, count) if count > rows else first_3R[:, :count].long()
        return Tables(table[0], table[1], table[2], pages_RP, last_R, adapters_R, greedy_R.bool())

    def receive_rest(self, count: int) -> Tensor:
        """So many whole numbers."""
        numbers = torch.empty(count, dtype=torch.int64)
        dist.broadcast(numbers, 0, self._group)
        return numbers


class Leader:
    """The runner of rank 0: all ranks make the calls that are made here. The other ranks are in `follow`."""

    def __init__(self, runner: Runner, reason: Callable[[Exception], Exception] = lambda error: error) -> None:
        """reason: finds out why a call has failed; the error may be but the loss of a connection."""
        self.runner, self._line, self._reason = runner, _Line(runner.sizes), reason
        self.sizes, self.shares_pages, self.vocab_size = runner.sizes, runner.shares_pages, runner.vocab_size
        self.adapters: Sequence[str] = runner.adapters

    def step(self, tables: Tables) -> Tensor:
        """See `Runner`."""
        with self._explained():
            self._line.send_step(tables)
            return self.runner.step(tables)

    def scores(self, texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0) -> list[Scores]:
        """See `Runner`."""
        longest = max(len(text) for text in texts)
        if longest > self.sizes.length + 1:  # the others would end with the error
            raise ConfigError(f"cannot score a text of {longest} tokens: at most {self.sizes.length + 1} fit here.")
        with self._explained():
            self._line.send(_SCORES, len(texts))
            self._line.send_rest(torch.tensor([num_likeliest, adapter, *(len(text) for text in texts)]))
            self._line.send_rest(torch.cat(list(texts)))
            return self.runner.scores(texts, num_likeliest, adapter)

    def prepare_next(self) -> bool:
        """See `Runner`."""
        with self._explained():
            self._line.send(_PREPARE)
            return self.runner.prepare_next()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = self._reason(error)
            if reason is error:
                raise
            raise reason from None

    def dismiss(self) -> None:
        """The other ranks return from `follow`."""
        self._line.send(_END)


def follow(runner: Runner) -> None:
    """Make the calls that rank 0 makes, until it dismisses this rank."""
    line = _Line(runner.sizes)
    while True:
        call, count = line.receive()
        if call == _END:
            return
        if call == _STEP:
            runner.step(line.receive_step(count))
        elif call == _SCORES:
            num_likeliest, adapter, *lengths = line.receive_rest(2 + count).tolist()
            runner.scores(line.receive_rest(sum(lengths)).split(lengths), num_likeliest, adapter)
        else:
            runner.prepare_next()
