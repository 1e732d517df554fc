"""The part of a batch that one rank works on: the rows that it needs, and of these the positions that it has."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mpar.data import Batches
from mpar.models import DRAW, with_draws, with_next_tokens
from mpar.program import Program, cut_rows, rows_of

__all__ = ["LocalBatches"]


class LocalBatches:
    """What `rank` works on, batch by batch. While one is worked on, a thread reads the next and copies it on its own stream.

    Nothing is remembered of what was read ahead: which batch comes next is known from the number of the step alone.
    next_tokens: the model also learns the tokens after the next, so batches have labels for them.
    seed, start: of the numbers by which training drops: the seed of the run, and the step of the training that reads batch 0.
    """

    def __init__(
        self,
        program: Program,
        batches: Batches,
        rank: int,
        device: torch.device,
        *,
        next_tokens: bool = False,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        self._program, self._batches, self._device, self._next_tokens = program, batches, device, next_tokens
        self._rank, self._rows = rank, rows_of(program, rank)
        self._seed, self._start = seed, start
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "next batch")
        self._ahead: dict[int, Future[dict[str, Tensor]]] = {}

    def __enter__(self) -> "LocalBatches":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int, following: int | None) -> dict[str, Tensor]:
        """The batch of `step`, as `read` makes it. From now on that of `following` is read, unless it is None.

        Raises what reading raised.
        """
        ahead = self._ahead.pop(step, None)
        batch = self.read(step) if ahead is None else ahead.result()
        self._ahead = (
            {} if following is None or not self._batches.reads_ahead else {following: self._thread.submit(self.read, following)}
        )
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for value in batch.values():
                value.record_stream(current)
        return batch

    def read(self, step: int) -> dict[str, Tensor]:
        """The part of the global batch of `step` that the rank works on. Rows of other ranks are not read.

        On a GPU it is copied from pinned memory, on the stream beside that of the caller, who has to wait for it.
        """
        rows = self._batches.rows(step, self._rows)
        if self._next_tokens:  # must come before positions are cut, because the following token may be on another rank
            rows = with_next_tokens(rows)
        if DRAW in self._program.facts.batch:
            count = self._batches.shape.batch_size
            rows = with_draws(rows, seed=self._seed, step=self._start + step, rows=self._rows, num_rows=count)
        read = {key: value for key, value in rows.items() if key in self._program.facts.batch}
        part = cut_rows(self._program, read, self._rank)
        if self._stream is None:
            return part
        with torch.cuda.stream(self._stream):
            return {key: value.pin_memory().to(self._device, non_blocking=True) for key, value in part.items()}
