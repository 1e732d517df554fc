"""Worker: the thread that runs the engine. Requests come to it from the event loop, and their answers go back there."""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpar.errors import ConfigError, MparError, NumericsError
from mpar.infer import Answer, Assistant, Chosen, Sampling
from mpar.serve._latencies import Latencies
from mpar.serve._refusal import Refusal

__all__ = ["Counts", "Grown", "Job", "StepCounts", "Worker"]


@dataclass(frozen=True)
class Grown:
    """What has come for one choice of a job: text that is certain, the tokens, and why the answer has ended, if it has.

    prompt: the tokens of the prompt with their log-probabilities, which come first if they were asked for.
    error:  why the job cannot be answered; nothing comes after it. status: that of a response which says so.
    """

    index: int
    text: str = ""
    chosen: Sequence[Chosen] = ()
    finish: str | None = None
    prompt: Sequence[Chosen] = ()
    error: str | None = None
    status: int = 400


@dataclass(eq=False)
class Job:
    """Prompts that one request asks to continue, each `num_choices` times. `events` belongs to the event loop `loop`.

    scores_prompts: whether log-probabilities of the prompts' own tokens are wanted, too.
    adapter:        the name of the adapter with which they are answered; None: the model alone.
    only_prompts:   whether no token is wanted behind the prompts.
    events:         what has come; None: the client has left.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    num_choices: int
    scores_prompts: bool
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Grown | None] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    num_shared: int = 0
    adapter: str | None = None
    only_prompts: bool = False
    asked_s: float = field(default_factory=time.monotonic)

    def tell(self, grown: Grown) -> None:
        """Let the event loop know; called by the worker."""
        _call(self.loop, lambda: self.events.put_nowait(grown))


@dataclass
class _Place:
    """Where an answer belongs: its job and its index there; how many of its tokens were told, and when the last of them was."""

    job: Job
    index: int
    told: int = 0
    told_s: float = 0.0


@dataclass
class Counts:
    """What has happened since the start with one adapter, or with the model alone, for /metrics."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    answer_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict)


@dataclass
class StepCounts:
    """What has happened since the start that concerns all models, for /metrics."""

    steps: int = 0
    step_s: float = 0.0
    refused: int = 0
    latencies: Latencies = field(default_factory=Latencies)


class Worker(threading.Thread):
    """Runs an assistant.

    max_waiting: how many answers may wait for a row before further requests are refused.
    on_failure:  is called after an error of the engine, when everybody has been told.
    """

    def __init__(self, assistant: Assistant, max_waiting: int, on_failure: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="mpar-engine", daemon=True)
        self.assistant, self.max_waiting, self.on_failure = assistant, max_waiting, on_failure
        self.steps = StepCounts()
        self.failure: Exception | None = None
        self.counts = {adapter: Counts() for adapter in (None, *assistant.engine.runner.adapters)}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._places: dict[Answer, _Place] = {}
        self._jobs: dict[Job, int] = {}  # jobs that have not ended, with their numbers of answers that have not
        self._num_queued = 0  # answers that the event loop has asked for and the thread has not begun yet
        self._prepares = True  # whether the runner has something to prepare
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """How many answers wait for a row."""
        return len(self.assistant.engine.scheduler.waiting) + self._num_queued

    @property
    def num_running(self) -> int:
        """How many answers have a row."""
        return len(self.assistant.engine.scheduler.running)

    def submit(self, job: Job) -> None:
        """Begin a job; called by the event loop. Raises Refusal if too many wait, a prompt does not fit, or the engine failed."""
        count = len(job.prompts) * job.num_choices
        self.check_runs()
        sizes = self.assistant.engine.runner.sizes
        if count > self.max_waiting + sizes.rows:
            most = self.max_waiting + sizes.rows
            raise Refusal(400, f"the request asks for {count} answers; at most {most} may be made or wait at a time", "prompt")
        if self.num_waiting + count > self.max_waiting and self.num_waiting:
            self.steps.refused += 1
            most = self.max_waiting
            raise Refusal(429, f"as many answers wait already as may: {self.num_waiting} of {most}", retry_after_s=1)
        for tokens in job.prompts:
            if len(tokens) > sizes.length or (len(tokens) == sizes.length and not job.only_prompts):
                raise Refusal(400, f"the prompt has {len(tokens)} tokens; it and the answer may have {sizes.length}", "prompt")
        with self._lock:
            self.check_runs()
            self._jobs[job] = count
            self._num_queued += count
        self._commands.put(lambda: self._begin(job))

    def check_runs(self) -> None:
        """Raise Refusal after the engine has failed."""
        if self.failure is not None:
            raise Refusal(503, _words(self.failure))

    def cancel(self, job: Job) -> None:
        """Give up a job; called by the event loop. Nothing happens if it has ended."""
        job.is_cancelled = True
        self._commands.put(lambda: self._drop(job))

    def stop(self) -> None:
        """End the thread once its current step is done."""
        self._commands.put(None)

    def run(self) -> None:
        """Do what is asked until `stop`. An error of the engine ends all jobs, and is kept in `failure`."""
        try:
            while self._take_commands():
                began = time.monotonic()
                _deliver([self._growth(answer) for answer in self.assistant.step() if answer in self._places])
                self.steps.steps += 1
                self.steps.step_s += time.monotonic() - began
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Tell all jobs that the engine has stopped, and refuse further ones; only the first time that this is called. Any thread
        may call this: that of the engine may wait for a rank that is gone."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self.give_up(_words(error))
        self.on_failure()

    def give_up(self, why: str) -> None:
        """Tell all jobs that no more comes of them."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.tell(Grown(0, error=why, status=503))

    def _take_commands(self) -> bool:
        """Do all commands; while there is nothing to answer, prepare for later steps, and then wait for a command. Returns False
        when the thread is to end."""
        while True:
            is_idle = self.assistant.is_idle
            try:
                command = self._commands.get(block=is_idle and not self._prepares)
            except queue.Empty:
                if not is_idle:
                    return True
                self._prepares = self.assistant.engine.runner.prepare_next()
                continue
            if command is None:
                return False
            command()

    def _begin(self, job: Job) -> None:
        with self._lock:
            self._num_queued -= len(job.prompts) * job.num_choices
        if job.is_cancelled:
            self._jobs.pop(job, None)
            return
        try:
            for number, tokens in enumerate(job.prompts):
                self._begin_prompt(job, number, tokens)
        except (ConfigError, NumericsError) as error:
            self._drop(job)
            job.tell(Grown(0, error=str(error), status=400 if isinstance(error, ConfigError) else 500))

    def _begin_prompt(self, job: Job, number: int, tokens: Sequence[int]) -> None:
        if job.scores_prompts:
            scores = self.assistant.score(tokens, job.sampling.num_alternatives or 0, job.adapter)
            for choice in range(job.num_choices):
                job.tell(Grown(number * job.num_choices + choice, prompt=scores))
        for choice in range(job.num_choices):
            index = number * job.num_choices + choice
            if job.only_prompts:
                job.tell(Grown(index, finish="length"))
                self._count_end(job, "length")
            else:
                answer = self.assistant.continue_tokens(tokens, job.sampling, choice, job.adapter)
                self._places[answer] = _Place(job, index)
        self.counts[job.adapter].prompt_tokens += len(tokens)

    def _drop(self, job: Job) -> None:
        for answer in [answer for answer, place in self._places.items() if place.job is job]:
            self.assistant.cancel(answer)
            self._end(answer, "cancelled")
        self._jobs.pop(job, None)

    def _growth(self, answer: Answer) -> tuple[Job, Grown]:
        """What an answer has grown by, and of which job it is. If it could not be made, the others of its job are given up."""
        place = self._places[answer]
        job, index, told, request = place.job, place.index, place.told, answer.request
        try:
            request.check()
        except NumericsError as error:
            self._end(answer, "error")
            self._drop(job)
            return job, Grown(index, error=str(error), status=500)
        if told == 0:
            job.num_shared += request.num_shared or 0
            self.counts[job.adapter].shared_tokens += request.num_shared or 0
        self._measure(place, len(request.chosen))
        self.counts[job.adapter].answer_tokens += len(request.chosen) - told
        grown = Grown(index, answer.take(), request.chosen[told:], request.finish)
        if request.finish is not None:
            self._end(answer, request.finish)
        return job, grown

    def _measure(self, place: _Place, count: int) -> None:
        """Keep that so many tokens of an answer are told now."""
        now_s = time.monotonic()
        if place.told == 0 and count:
            self.steps.latencies.first_token_s.observe(now_s - place.job.asked_s)
        elif count > place.told:
            self.steps.latencies.next_token_s.observe((now_s - place.told_s) / (count - place.told))
        place.told, place.told_s = count, now_s

    def _end(self, answer: Answer, why: str) -> None:
        job = self._places.pop(answer).job
        if why in ("stop", "length"):
            self.steps.latencies.answer_s.observe(time.monotonic() - job.asked_s)
        self._count_end(job, why)

    def _count_end(self, job: Job, why: str) -> None:
        self._jobs[job] -= 1
        if self._jobs[job] == 0:
            del self._jobs[job]
        ended = self.counts[job.adapter].ended
        ended[why] = ended.get(why, 0) + 1


def _words(failure: Exception) -> str:
    known = str(failure) if isinstance(failure, MparError) else f"{type(failure).__name__}: {failure}"
    return f"the engine has stopped: {known}"


def _deliver(told: Sequence[tuple[Job, Grown]]) -> None:
    """Let the event loop know what a step has brought: it is woken once, not once for each answer."""

    def put(pairs: Sequence[tuple[Job, Grown]]) -> None:
        for job, grown in pairs:
            job.events.put_nowait(grown)

    for loop in {job.loop for job, _ in told}:
        _call(loop, functools.partial(put, [(job, grown) for job, grown in told if job.loop is loop]))


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    """Have the event loop do this, unless it is closed: then the server has ended, and nobody waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(work)
