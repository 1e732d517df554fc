"""Engine: answers many requests at the same time. Each step reads tokens of several of them and chooses their next tokens."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mpar.errors import ConfigError, UnknownNameError, brief
from mpar.infer._choose import History, choose
from mpar.infer._pages import SPARE_PAGE
from mpar.infer._request import Request
from mpar.infer._sampling import Sampling
from mpar.infer._scheduler import Scheduler, Sizes, Turn
from mpar.infer._scores import Scores
from mpar.infer._tables import Tables

__all__ = ["Engine", "Runner"]


class Runner(Protocol):
    """Computes logits. It keeps the cache, of which the engine only knows the pages."""

    sizes: Sizes

    @property
    def shares_pages(self) -> bool:
        """Whether rows with an equal beginning may have pages in common."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters of which each row has one, or none."""

    def step(self, tables: Tables) -> Tensor:
        """The logits (R, V) behind the tokens number `last_R` of the step; where that is -1, they mean nothing. Of a row that is
        greedy, all but the largest ones may be -inf."""

    def scores(self, texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0) -> list[Scores]:
        """The scores of texts of at least two tokens each, computed as wholes, without the cache, with the adapter of this number
        or none. Raises ConfigError for a text that is longer than rows may be."""

    def prepare_next(self) -> bool:
        """Do now a part of what the first steps would otherwise have to wait for; returns whether there is more to do."""

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Compute with other parameters from now on: tensors by path, which are read as they are; only matrices in
        bfloat16 on a CPU are copied, into the order in which products read them.

        Raises ShapeError, listing all problems, unless they are those of the model.
        """


class Engine:
    """Answers requests with a runner.

    eos_ids:  tokens that always end an answer, unless its sampling ignores them.
    stopped:  `fn(request)` is called for every new token that does not end an answer itself; it gives the text that has ended
              the answer, None as long as none has.
    allowed:  `fn(request)` gives for each token whether it may come next; None: all may.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_ids: Sequence[int] = (),
        stopped: Callable[[Request], str | None] = lambda request: None,
        allowed: Callable[[Request], Tensor | None] = lambda request: None,
    ) -> None:
        self.runner, self.stopped, self.allowed = runner, stopped, allowed
        self.eos_ids = tuple(token for token in eos_ids if 0 <= token < runner.vocab_size)  # others never come
        self.scheduler = Scheduler(runner.sizes, shares=runner.shares_pages)
        self.num_steps = 0
        self._pages_RP = torch.full((runner.sizes.rows, runner.sizes.row_pages), SPARE_PAGE)
        self._written: list[tuple[list[int], int]] = [([], 0)] * runner.sizes.rows  # for each row its list, and how much of it

    @property
    def is_idle(self) -> bool:
        """Whether all requests have ended."""
        return not self.scheduler.waiting and not self.scheduler.running

    def add(self, prompt: Sequence[int], sampling: Sampling, choice: int = 0, adapter: str | None = None) -> Request:
        """A new request, which the model answers with the adapter of this name; None: without any.

        Raises ConfigError for a prompt that is empty or leaves no room for an answer, or tokens that the model does not have;
        UnknownNameError for an unknown adapter.
        """
        outside = [token for token in (*sampling.stop_ids, *sampling.bias) if token >= self.runner.vocab_size]
        if outside:
            size = self.runner.vocab_size
            raise ConfigError(f"cannot answer with the tokens {brief(outside)} in stop_ids or bias: the model has {size} tokens")
        request = Request(list(prompt), sampling, choice, self.number_of(adapter))
        self.scheduler.add(request)
        return request

    def number_of(self, adapter: str | None) -> int:
        """The number of an adapter for the runner; 0 for None. Raises UnknownNameError with the nearest names."""
        known = list(self.runner.adapters)
        if adapter is not None and adapter not in known:
            near = ", ".join(difflib.get_close_matches(adapter, known, n=3, cutoff=0.0)) or "none"
            raise UnknownNameError(f"cannot answer with the adapter {adapter!r}: there is no such one; nearest: {near}")
        return 0 if adapter is None else known.index(adapter) + 1

    def cancel(self, request: Request) -> None:
        """Give up a request that has not ended yet."""
        self.scheduler.finish(request, "cancelled")

    def step(self) -> list[Request]:
        """Run one step; returns the requests whose answers have become longer or have ended. An answer ends with an error where
        logits are no finite numbers."""
        turns = self.scheduler.next_turns()
        if not turns:
            return []
        histories = {turn.request: self._history(turn.request) for turn in turns if turn.chooses}
        logits_RV = self.runner.step(self._tables(turns, histories))
        self.num_steps += 1
        self.scheduler.finish_turns(turns)
        grown = [request for request in histories if request.finish is None]
        if not grown:
            return []
        rows = [request.row for request in grown]
        logits = logits_RV if rows == list(range(len(logits_RV))) else logits_RV[rows]
        found = choose(logits, [histories[request] for request in grown])
        for request, chosen in zip(grown, found, strict=True):
            if chosen is None:
                self.scheduler.finish(request, "error")
            else:
                request.append(chosen)
                self._end(request)
        return grown

    def forget(self) -> None:
        """Find no prompt in the cache any more, because the parameters have changed. No request may be under way."""
        assert self.is_idle, "requests are under way, which have read their prompts with the parameters of before"
        for pool in self.scheduler.pools:
            pool.forget()

    def run(self) -> Iterator[Request]:
        """Run steps until all requests have ended; gives each request as often as its answer becomes longer. Raises NumericsError
        if one cannot be answered."""
        while not self.is_idle:
            for request in self.step():
                request.check()
                yield request

    def _history(self, request: Request) -> History:
        sampling, answer, allowed_V = request.sampling, request.answer, self.allowed(request)
        may_end = len(answer) >= sampling.min_tokens or allowed_V is not None
        banned = () if may_end else (*self._end_ids(sampling), *sampling.stop_ids)
        return History(request.prompt, answer, sampling, request.choice, banned, allowed_V)

    def _end_ids(self, sampling: Sampling) -> Sequence[int]:
        return () if sampling.ignore_eos else self.eos_ids

    def _end(self, request: Request) -> None:
        """End a request whose last token or text ends its answer, or that may have no more tokens."""
        sampling, count = request.sampling, len(request.chosen)
        token = request.tokens[-1]
        if token in self._end_ids(sampling) or token in sampling.stop_ids or self.stopped(request) is not None:
            self.scheduler.finish(request, "stop")
        elif count == sampling.max_tokens or self.scheduler.room(request) < 1:
            self.scheduler.finish(request, "length")

    def _tables(self, turns: Sequence[Turn], histories: Mapping[Request, History]) -> Tables:
        """What the runner is given. histories: of the requests whose next tokens will be chosen."""
        sizes = self.runner.sizes
        tokens: list[int] = []
        order: list[int] = []
        rows: list[int] = []
        last, adapters, greedy = [-1] * sizes.rows, [0] * sizes.rows, [True] * sizes.rows
        for turn in turns:
            request = turn.request
            tokens += request.tokens[turn.start : turn.end]
            order += range(turn.start, turn.end)
            rows += [request.row] * (turn.end - turn.start)
            adapters[request.row] = request.adapter
            self._write_pages(request)
            if turn.chooses:
                last[request.row] = len(tokens) - 1
                greedy[request.row] = histories[request].takes_largest
        tokens_T, order_T, rows_T = (torch.tensor(column) for column in (tokens, order, rows))
        last_R, adapters_R, greedy_R = (torch.tensor(column) for column in (last, adapters, greedy))
        return Tables(tokens_T, order_T, rows_T, self._pages_RP, last_R, adapters_R, greedy_R)

    def _write_pages(self, request: Request) -> None:
        """Bring the table of pages up to date for the row of a request; most steps change nothing there."""
        pages, row_P = request.pages, self._pages_RP[request.row]
        written, count = self._written[request.row]
        if written is not pages:  # the scheduler makes a new list when a request gets a row
            row_P.fill_(SPARE_PAGE)
            count = 0
        if count < len(pages):
            row_P[count : len(pages)] = torch.tensor(pages[count:])
        self._written[request.row] = pages, len(pages)
