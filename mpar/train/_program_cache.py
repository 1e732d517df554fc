"""Compiled programs that are kept from run to run, so that the same configuration is compiled once.

An entry is one file of plain data, named by a hash of all that the program depends on. Ranks run the Python in a program, so an
entry counts only if nobody but this user could have written it. Whatever is wrong with an entry, the program is compiled again.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mpar import plain
from mpar.code_facts import code_facts
from mpar.errors import PlainDataError
from mpar.files import MAX_TABLE_BYTES, Unreadable, read_text
from mpar.kept_files import KeptFiles, NotUsableError, reason
from mpar.plug_ins import source_digests
from mpar.program import Program
from mpar.train._plug_ins import RATE_KEYS, plug_ins
from mpar.train._setup import RunSetup, batch_shapes, teacher_of

__all__ = ["COMPILER_PACKAGES", "ProgramCache", "program_key"]

_SUFFIX = ".program"
_MOST_ENTRIES, _MOST_BYTES = 64, 2 * 2**30
COMPILER_PACKAGES = ("triton", "numpy", "networkx")
"""Those on which the compiler's result depends."""

_NOT_COMPILED = (
    "checkpoint", "compile_cache", "data", "evaluation", "execution", "experiment", "init_from", "num_threads", "on_spike",
    "on_zero_gradient", "optimizer", "plan", "progress", "resume", "restarts", "run_dir", "seed", "spike", "steps", "task",
    "tensorboard", "time_limit", "timeout_s",
)  # fmt: skip
"""Keys that no program depends on; a key that is not listed here counts. Of `optimizer` all but the learning rate counts, and of
`data` the shapes of the batch that it gives."""


@dataclass(frozen=True)
class _Entry:
    """key: of what the program was compiled, so that an entry under another name is found out."""

    key: str
    program: Program


def program_key(setup: RunSetup, role: str) -> str:
    """A hash of everything that the program of `setup` for `role`, `training` or `evaluation`, depends on.

    That is the configuration, the files that it names, the source of mpar and of plug-ins, and the versions of Python and of its
    packages. The learning rate does not count, because it is no part of the code.
    """
    config = asdict(setup.config)
    facts = {name: value for name, value in config.items() if name not in _NOT_COMPILED}
    facts["batch"] = batch_shapes(setup.config, setup.chain, setup.model)
    facts["optimizer"] = {name: value for name, value in config["optimizer"].items() if name not in RATE_KEYS}
    of_tokens = config["task"]["learn"] == "next_token" and config["task"]["kind"] != "prompt"
    facts["task"] = {name: value for name, value in config["task"].items() if name in ("plugin", "options") or not of_tokens}
    table, files = setup.config.schedule.table, {"model": json.dumps(setup.model.hf_config)}
    if setup.config.task.teacher is not None:
        files["teacher"] = json.dumps(teacher_of(setup.config).hf_config)
    if table is not None:
        with suppress(Unreadable):  # the compiler says that it cannot read the table
            files["table"] = read_text(table, MAX_TABLE_BYTES)
    here = [repr(setup.kernels), *code_facts(COMPILER_PACKAGES), *source_digests(plug_ins(setup.config))]
    text = json.dumps([role, facts, files, here], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ProgramCache:
    """The folder of kept programs. Several processes may use it at the same time."""

    folder: Path

    def get(self, key: str, compile_program: Callable[[], Program]) -> tuple[Program, str]:
        """The program of `find`, and a line on which of them it was, and on what is wrong."""
        program, source, problems = self.find(key, compile_program)
        return program, "; ".join([source, *problems])

    def find(self, key: str, compile_program: Callable[[], Program]) -> tuple[Program, str, list[str]]:
        """The program kept under `key`, else that of `compile_program`, which is then kept; in words which of them it was; and
        why an entry could not be read or written, which is no error. What `compile_program` raises is raised.

        A kept program has no optimizer, as its learning rate may be another one: the caller gives it one.
        """
        problems: list[str] = []
        began, kept = time.perf_counter(), KeptFiles(self.folder, _SUFFIX, _MOST_ENTRIES, _MOST_BYTES)
        try:
            program = _program_in(kept.read(key), key)
        except FileNotFoundError:
            pass
        except (NotUsableError, PlainDataError, OSError) as error:
            problems.append(f"{kept.path(key)} was not used: {reason(error)}")
        else:
            return program, f"program from the cache, read in {time.perf_counter() - began:.2f} s", problems
        program = compile_program()
        source = f"program compiled in {time.perf_counter() - began:.1f} s"
        try:
            kept.write(key, plain.to_text(_Entry, _Entry(key, program.with_optimizer(None))))
        except (NotUsableError, PlainDataError, OSError) as error:
            problems.append(f"it is not kept: {reason(error)}")
        return program, source, problems


def _program_in(text: bytes, key: str) -> Program:
    entry = plain.from_text(_Entry, text)
    if entry.key != key:
        raise NotUsableError("it is the program of another configuration")
    return entry.program
