"""A model that answers, in this process or on several ranks. Then this process is rank 0, and the others do what it does."""

import contextlib
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpar import errors
from mpar.cli._failures import read_failure
from mpar.cli._job_folder import job_folder
from mpar.cli._later import later
from mpar.cli._launch import RankFailure
from mpar.cli._model_folder import model_of_run
from mpar.cli._ranks import Ranks
from mpar.cli._screen import CompileNotes
from mpar.errors import MparError, ProgramError
from mpar.train import MeshConfig, StrategyConfig, key
from mpar.user_cache import user_cache

if TYPE_CHECKING:
    from mpar.infer import Assistant  # which loads torch
    from mpar.models import Model

__all__ = ["AnswerKeys", "ChoiceKeys", "answer_problems", "answering", "load"]

_LOOK_S = 0.05
_END_S = 5.0  # for ranks that were dismissed
_REASON_S = 2.0  # an error may reach rank 0 before the end of the process that is its reason
_DTYPES = ("float32", "bfloat16", "float16")
_EXECUTIONS = ("eager", "inductor")


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """An adapter that is added to the weights. One word is enough: `adapter=FOLDER` is `adapter.path=FOLDER`."""

    path: str | None = key("a folder of PEFT; null: no adapter", default=None)

    @staticmethod
    def key_of_word(word: str) -> str:
        """The key that `adapter=WORD` sets to WORD."""
        return "path"


@dataclass(frozen=True, kw_only=True)
class AnswerKeys:
    """The keys of every command that lets a model answer: how it is loaded, and on which ranks it runs."""

    rows: int = key("the most answers that are made at the same time", default=16, at_least=1)
    length: int | None = key(
        "the most tokens of a prompt and its answer, for rows times as many of which there is memory; "
        "null: as many as the model can take, at most 8,192",
        default=None,
        at_least=2,
    )
    adapter: AdapterFolder = key("an adapter that is added to the weights", default_factory=AdapterFolder)  # noqa: RUF009 (a field)
    dtype: str = key("float32, bfloat16 or float16: of the weights and of what is computed", default="float32")
    execution: str = key(
        "eager: run the generated code; inductor: compile it with torch's Inductor, which takes a while and needs a C++ compiler",
        default="eager",
    )
    compile_cache: str | None = key(
        "folder in which programs are kept from run to run; user: ~/.cache/mpar/answers; null: nothing is kept", default="user"
    )
    mesh: MeshConfig
    strategy: StrategyConfig


@dataclass(frozen=True, kw_only=True)
class ChoiceKeys(AnswerKeys):
    """Those of commands of whose answers each may have an adapter of its own."""

    adapters: dict[str, str] = key("folders of PEFT by name; each answer has one of these adapters or none", default_factory=dict)  # noqa: RUF009 (a field)


def answer_problems(config: AnswerKeys) -> list[str]:
    """What is wrong with these keys."""
    known = {"dtype": _DTYPES, "execution": _EXECUTIONS}
    problems = [
        f"{name}={getattr(config, name)}: choose {', '.join(values[:-1])} or {values[-1]}"
        for name, values in known.items()
        if getattr(config, name) not in values
    ]
    if isinstance(config, ChoiceKeys) and config.adapters and config.adapter.path is not None:
        problems.append("both adapter, for all answers, and adapters, for each: give the former as one of the latter")
    return problems


@contextlib.contextmanager
def answering(
    config: AnswerKeys, folder: Path, notes: CompileNotes, lost: Callable[[str], object] = lambda text: None
) -> Iterator[tuple["Model", "Assistant"]]:
    """The model in a folder of Hugging Face, and an assistant that answers with it, on the ranks of `config`.

    notes: is told when programs are compiled, on this rank; the others do so at the same time.
    lost: is called, in a thread of its own, with what happened to a rank that has ended before all was done.
    Raises RankFailure when the work failed because of that, or the MparError that a rank has raised. No rank is left in any case.
    """
    size = math.prod(asdict(config.mesh).values())
    if size == 1:
        yield load(config, folder, notes)
        return
    follower = later("mpar.cli._follower")
    with job_folder() as job:
        (job / "temp").mkdir(mode=0o700)
        follower.write_request(job, config, folder)
        ranks = Ranks(size, (str(job),), (), job / "temp", module="mpar.cli._follower", first=1)
        watch = _Watch(ranks, job, lost)
        try:
            follower.meet(job, 0, size)
            model, assistant = load(config, folder, notes)
            leader = later("mpar.infer.run").Leader(assistant.engine.runner, watch.reason)
            assistant.engine.runner = leader
            yield model, assistant
            watch.end()
            leader.dismiss()
            ranks.wait(_END_S)
        except Exception as error:
            raise watch.reason(error) from None
        finally:
            watch.end()
            ranks.kill()


class _Watch(threading.Thread):
    """Looks whether ranks are there until `end` is called, which is before they may end."""

    def __init__(self, ranks: Ranks, job: Path, lost: Callable[[str], object]) -> None:
        super().__init__(name="mpar-watch", daemon=True)
        self._ranks, self._job, self._lost = ranks, job, lost
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Tell about the first rank that has ended."""
        while not self._ended.wait(_LOOK_S):
            if self._ranks.ended():
                self._lost(str(self._failure()))
                return

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def reason(self, error: Exception) -> Exception:
        """Why the work failed: that a rank has ended, if one has, unless rank 0 knows better; else `error`."""
        known = isinstance(error, MparError) and not isinstance(error, ProgramError)
        end = time.monotonic() + _REASON_S
        while not known and not self._ranks.ended() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self._failure() if not known and self._ranks.ended() else error

    def _failure(self) -> MparError:
        """What happened to the ranks that have ended."""
        codes = self._ranks.ended()
        failures = [failure for rank in codes if (failure := read_failure(self._job, rank)) is not None]
        if failures and failures[0].known:
            return getattr(errors, failures[0].title, ProgramError)(failures[0].message)
        if failures:
            return RankFailure(f"rank {failures[0].rank} failed: {failures[0].message.strip()}")
        ends = (f"was killed by {signal.Signals(-c).name}" if c < 0 else f"ended with exit code {c}" for c in codes.values())
        return RankFailure("; ".join(f"rank {rank} {end}" for rank, end in zip(codes, ends, strict=True)))


def load(config: AnswerKeys, folder: Path, notes: CompileNotes | None = None) -> tuple["Model", "Assistant"]:
    """The model and an assistant in this process, which is one of the ranks of `config`. notes: see `answering`."""
    train, answers = later("mpar.train"), later("mpar.train.answers")
    if notes is not None:
        later("mpar.cpp").prepare_kernels(functools.partial(notes, shown=True))
    mesh, strategy = train.make_mesh(config.mesh), train.make_strategy(config.strategy, config.mesh)
    dtype = getattr(later("torch"), config.dtype)
    return answers.load_assistant(
        folder,
        model_of_run(folder.parent),
        rows=config.rows,
        dtype=dtype,
        adapter=config.adapter.path,
        by_name=config.adapters if isinstance(config, ChoiceKeys) else {},
        mesh=mesh,
        strategy=strategy,
        execution=config.execution,
        length=config.length,
        compiling=notes or contextlib.nullcontext,
        kept_programs=_cache_folder(config.compile_cache),
        warn=notes.warn if notes else lambda text: None,
    )


def _cache_folder(name: str | None) -> Path | None:
    """The folder that `compile_cache` names."""
    return user_cache() / "answers" if name == "user" else None if name is None else Path(name)
