"""Scheduler: which tokens of which requests the next step reads, and which pages of the cache hold their keys and values.

A step reads at most `Sizes.tokens` tokens of at most `Sizes.rows` requests. A request whose prompt is in the cache reads one
token, the one chosen last. Room that is left goes to prompts, which may be read in several steps. If the pages do not suffice,
the request that came last gives its pages back, and is read again later. So the request that came first always goes on.
"""

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
    pages:     the pages of the cache, of `page_size` tokens each; the first of them is spare.
    length:    the most tokens of a prompt and its answer.
    Raises ConfigError with all sizes that do not fit each other.
    """

    rows: int = 16
    tokens: int = 512
    pages: int = 513
    page_size: int = 16
    length: int = 4096

    def __post_init__(self) -> None:
        problems = [f"{name}={size} is not positive" for name, size in vars(self).items() if size < 1]
        if self.tokens < self.rows:
            problems.append(f"tokens={self.tokens} is less than one for each of rows={self.rows}")
        if self.pages < 2:
            problems.append(f"pages={self.pages}: one page is spare, so at least 2 are needed")
        if problems:
            raise ConfigError("cannot schedule requests with\n  " + "\n  ".join(problems))

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


class Scheduler:
    """Decides what the next step reads; `shares` says whether prompts with an equal beginning share its pages."""

    def __init__(self, sizes: Sizes, *, shares: bool = True) -> None:
        self.sizes, self.shares = sizes, shares
        self.pool = PagePool(sizes.pages, sizes.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came
        self.num_preempted = 0
        self._free_rows = list(reversed(range(sizes.rows)))

    def room(self, request: Request) -> int:
        """How many more tokens a request may have, by the length of rows and the pages of the whole cache."""
        return min(self.sizes.length, (self.sizes.pages - 1) * self.sizes.page_size) - len(request.tokens)

    def add(self, request: Request) -> None:
        """A request waits for its turn. Raises ConfigError for a prompt that is empty or leaves no room for an answer."""
        if not request.prompt or self.room(request) < 1:
            most = self.room(request) + len(request.tokens) - 1
            raise ConfigError(f"cannot answer a prompt of {len(request.prompt)} tokens: between 1 and {most} fit here.")
        self.waiting.append(request)

    def finish(self, request: Request, why: Finish) -> None:
        """A request has ended, or is given up; its pages are free."""
        if request.finish is not None:
            return
        request.finish = why
        if request in self.running:
            self._take_off(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def next_turns(self) -> list[Turn]:
        """What the next step reads; empty if nothing waits or runs."""
        turns: dict[Request, Turn] = {}
        preempted = self.num_preempted
        by_need = sorted(self.running, key=lambda request: request.num_missing > 1)  # first those that only need one token
        for request in by_need:
            self._schedule(request, turns)
        while self.waiting and self._free_rows and self.num_preempted == preempted:
            if not self._admit(self.waiting[0], turns):
                break
        return list(turns.values())

    def finish_turns(self, turns: list[Turn]) -> None:
        """The step has read these: their keys and values are in the cache, and full pages can be found by other prompts."""
        for turn in turns:
            request, size = turn.request, self.sizes.page_size
            if request.row < 0:  # it was cancelled while the step ran
                continue
            request.num_cached = turn.end
            while self.shares and (index := len(request.chain)) < turn.end // size:
                parent = request.chain[-1] if request.chain else 0
                request.chain.append(self.pool.remember(request.pages[index], parent, request.tokens, index))

    def _schedule(self, request: Request, turns: dict[Request, Turn]) -> None:
        """Give a running request a turn, unless it lost its pages or the step is full."""
        count = min(request.num_missing, self.sizes.tokens - _num_tokens(turns))
        if request.row < 0 or count == 0:
            return
        end = request.num_cached + count
        while (missing := self._pages_missing(request, end)) > self.pool.num_free:
            victim = self.running[-1]
            turns.pop(victim, None)
            self._take_off(victim)
            self.waiting.appendleft(victim)
            self.num_preempted += 1
            if victim is request:
                return
        request.pages += [self.pool.take() for _ in range(missing)]
        turns[request] = Turn(request, request.num_cached, end)

    def _admit(self, request: Request, turns: dict[Request, Turn]) -> bool:
        """Let the first request that waits run, if the step and the cache have room for it."""
        budget = self.sizes.tokens - _num_tokens(turns)
        if budget == 0:
            return False
        shared = self.pool.share(request.tokens, len(request.tokens) - 1) if self.shares else []
        start = len(shared) * self.sizes.page_size
        end = min(len(request.tokens), start + budget)
        request.pages = [page for page, _ in shared]
        if self._pages_missing(request, end) > self.pool.num_free:
            self.pool.release(request.pages)
            request.pages = []
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.row = self._free_rows.pop()
        request.chain = [number for _, number in shared]
        request.num_cached = start
        if request.num_shared is None:
            request.num_shared = start
        request.pages += [self.pool.take() for _ in range(self._pages_missing(request, end))]
        turns[request] = Turn(request, start, end)
        return True

    def _take_off(self, request: Request) -> None:
        """A request does not run any more; the cache has nothing of it."""
        self.running.remove(request)
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        request.pages, request.chain, request.row, request.num_cached = [], [], -1, 0

    def _pages_missing(self, request: Request, end: int) -> int:
        """How many more pages a request needs for its first `end` tokens."""
        return -(-end // self.sizes.page_size) - len(request.pages)


def _num_tokens(turns: dict[Request, Turn]) -> int:
    return sum(turn.end - turn.start for turn in turns.values())
