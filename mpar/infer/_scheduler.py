"""Scheduler: which tokens of which requests the next step reads, and which pages of the cache hold their keys and values.

A step reads at most `Sizes.tokens` tokens of at most `Sizes.rows` requests. A request whose prompt is in the cache reads one
token, the one chosen last. Room that is left goes to prompts, which may be read in several steps; there is less of it beside
answers, which have to wait for the step. If the pages do not suffice, the request that came last gives its pages back, and is
read again later. So the request that came first always goes on.
"""

import bisect
from collections import deque
from dataclasses import dataclass

from mpar.errors import ConfigError
from mpar.infer._pages import PagePool
from mpar.infer._request import Finish, Request

__all__ = ["Scheduler", "Sizes", "Turn"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The fixed sizes of the steps of an engine.

    rows:      the most requests of a step. tokens: the most tokens of a step, at least one for each row.
    beside:    the most tokens of a step in which an answer goes on, at least one for each row; None: as many as of any step. It
               bounds how long answers wait for prompts that are read beside them.
    pages:     the pages of the cache, of `page_size` tokens each; the first of them is spare, and padding is written there. By
               default every number of ranks up to 8 divides them.
    length:    the most tokens of a prompt and its answer.
    groups:    into how many groups rows are divided, each with so many neighbouring ones, with a cache of its own of `pages`
               pages, and with at most `tokens` tokens in a step.
    Raises ConfigError with all sizes that do not fit each other.
    """

    rows: int = 16
    tokens: int = 512
    beside: int | None = None
    pages: int = 840
    page_size: int = 16
    length: int = 4096
    groups: int = 1

    def __post_init__(self) -> None:
        problems = [f"{name}={size} is not positive" for name, size in vars(self).items() if size is not None and size < 1]
        if self.groups > 0 and self.rows % self.groups:
            problems.append(f"rows={self.rows} cannot be divided into groups={self.groups}")
        for name, count in (("tokens", self.tokens), ("beside", self.beside)):
            if self.groups > 0 and count is not None and count < self.group_rows:
                problems.append(f"{name}={count} is less than one for each of rows={self.group_rows}")
        if self.beside is not None and self.beside > self.tokens:
            problems.append(f"beside={self.beside} is more than tokens={self.tokens}")
        if self.pages < 2:
            problems.append(f"pages={self.pages}: one page is spare, so at least 2 are needed")
        if problems:
            raise ConfigError("cannot schedule requests with\n  " + "\n  ".join(problems))

    @property
    def group_rows(self) -> int:
        """The rows of a group."""
        return self.rows // self.groups

    @property
    def row_pages(self) -> int:
        """The most pages of one request."""
        return -(-self.length // self.page_size)


@dataclass(frozen=True)
class Turn:
    """What a step does for a request: it reads its tokens `start` to `end - 1`."""

    request: Request
    start: int
    end: int

    @property
    def chooses(self) -> bool:
        """Whether the next token of the request can be chosen after the step."""
        return self.end == len(self.request.tokens)


class _Plan:
    """The turns of a step, and how many more tokens of each group it can read."""

    def __init__(self, room: int, groups: int) -> None:
        self.turns: dict[Request, Turn] = {}
        self.room = [room] * groups

    def add(self, turn: Turn, group: int) -> None:
        self.turns[turn.request] = turn
        self.room[group] -= turn.end - turn.start

    def remove(self, request: Request, group: int) -> None:
        """Take back the turn of a request, if it has one."""
        turn = self.turns.pop(request, None)
        if turn is not None:
            self.room[group] += turn.end - turn.start


class Scheduler:
    """Decides what the next step reads; `shares` says whether prompts with an equal beginning share its pages."""

    def __init__(self, sizes: Sizes, *, shares: bool = True) -> None:
        self.sizes, self.shares = sizes, shares
        self.pools = [PagePool(sizes.pages, sizes.page_size) for _ in range(sizes.groups)]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came
        self.num_added = self.num_preempted = 0
        self._numbers: dict[Request, int] = {}  # in which order those came that have not ended
        count = sizes.group_rows
        self._free_rows = [list(reversed(range(group * count, (group + 1) * count))) for group in range(sizes.groups)]

    def room(self, request: Request) -> int:
        """How many more tokens a request may have, by the length of rows and the pages of the whole cache."""
        return min(self.sizes.length, (self.sizes.pages - 1) * self.sizes.page_size) - len(request.tokens)

    def add(self, request: Request) -> None:
        """A request waits for its turn. Raises ConfigError for a prompt that is empty or leaves no room for an answer."""
        if not request.prompt or self.room(request) < 1:
            most = self.room(request) + len(request.tokens) - 1
            raise ConfigError(
                f"cannot answer a prompt of {len(request.prompt)} tokens: between 1 and {most} fit here. Use a shorter prompt, "
                "or more room: length=."
            )
        self.num_added += 1
        self._numbers[request] = self.num_added
        self.waiting.append(request)

    def finish(self, request: Request, why: Finish) -> None:
        """A request has ended, or is given up; its pages are free."""
        if request.finish is not None:
            return
        request.finish = why
        del self._numbers[request]
        if request in self.running:
            self._take_off(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def next_turns(self) -> list[Turn]:
        """What the next step reads; empty if nothing waits or runs."""
        go_on = [request for request in self.running if request.num_missing == 1]
        plan = _Plan((go_on and self.sizes.beside) or self.sizes.tokens, self.sizes.groups)
        preempted = self.num_preempted
        for request in [*go_on, *(request for request in self.running if request.num_missing > 1)]:
            self._schedule(request, plan)
        while self.waiting and self.num_preempted == preempted:
            if not any(self._admit(self.waiting[0], group, plan) for group in self._groups(plan)):
                break
        return list(plan.turns.values())

    def finish_turns(self, turns: list[Turn]) -> None:
        """The step has read these: their keys and values are in the cache, and full pages can be found by other prompts."""
        for turn in turns:
            request, size = turn.request, self.sizes.page_size
            if request.row < 0:  # it was cancelled while the step ran
                continue
            request.num_cached = turn.end
            while self.shares and (index := len(request.chain)) < turn.end // size:
                parent = request.chain[-1] if request.chain else _root(request)
                pool = self.pools[self._group(request)]
                request.chain.append(pool.remember(request.pages[index], parent, request.tokens, index))

    def _group(self, request: Request) -> int:
        return request.row // self.sizes.group_rows

    def _groups(self, plan: _Plan) -> list[int]:
        """The groups that have a free row, first the one of which the step can read the most tokens."""
        free = [group for group, rows in enumerate(self._free_rows) if rows]
        return sorted(free, key=lambda group: -plan.room[group])

    def _schedule(self, request: Request, plan: _Plan) -> None:
        """Give a running request a turn, unless it lost its pages or the step is full."""
        if request.row < 0:
            return
        group = self._group(request)
        count = min(request.num_missing, plan.room[group])
        if count == 0:
            return
        end, pool = request.num_cached + count, self.pools[group]
        while (missing := self._pages_missing(request, end)) > pool.num_free:
            victim = next(other for other in reversed(self.running) if self._group(other) == group)
            plan.remove(victim, group)
            self._take_off(victim)
            bisect.insort(self.waiting, victim, key=self._numbers.__getitem__)
            self.num_preempted += 1
            if victim is request:
                return
        request.pages += [pool.take() for _ in range(missing)]
        plan.add(Turn(request, request.num_cached, end), group)

    def _admit(self, request: Request, group: int, plan: _Plan) -> bool:
        """Let the first request that waits run in a group with a free row, if the step and the cache have room for it there."""
        room, pool = plan.room[group], self.pools[group]
        if room == 0:
            return False
        shared = pool.share(request.tokens, len(request.tokens) - 1, _root(request)) if self.shares else []
        start = len(shared) * self.sizes.page_size
        end = min(len(request.tokens), start + room)
        request.pages = [page for page, _ in shared]
        if self._pages_missing(request, end) > pool.num_free:
            pool.release(request.pages)
            request.pages = []
            return False
        self.waiting.popleft()
        bisect.insort(self.running, request, key=self._numbers.__getitem__)
        request.row = self._free_rows[group].pop()
        request.chain = [number for _, number in shared]
        request.num_cached = start
        if request.num_shared is None:
            request.num_shared = start
        request.pages += [pool.take() for _ in range(self._pages_missing(request, end))]
        plan.add(Turn(request, start, end), group)
        return True

    def _take_off(self, request: Request) -> None:
        """A request does not run any more; the cache has nothing of it."""
        group = self._group(request)
        self.running.remove(request)
        self.pools[group].release(request.pages)
        self._free_rows[group].append(request.row)
        request.pages, request.chain, request.row, request.num_cached = [], [], -1, 0

    def _pages_missing(self, request: Request, end: int) -> int:
        """How many more pages a request needs for its first `end` tokens."""
        return -(-end // self.sizes.page_size) - len(request.pages)


def _root(request: Request) -> int:
    """What the first page of a request is behind: keys and values depend on the adapter."""
    return -request.adapter
