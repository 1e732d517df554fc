"""Commands of pages: run, planned in place of run, or checked.

Some lines of `sh` blocks cannot be run as they stand, because they train for minutes, or need a second machine. So
- `mpar plan` runs;
- `mpar train`, under torchrun too, is planned with the same overrides: it is compiled, verified and predicted;
- a line with a name in capitals (DIR, HOST), a sweep, `mpar generate`, `eval`, `serve` and `export` have their overrides checked;
- `pip install` must name extras that exist, `python -m` a module that exists, and any other line a known program.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpar.cli import main as command_line
from mpar.cli._arguments import read_arguments
from mpar.cli._compose import check_overrides
from mpar.cli._eval import EvalConfig
from mpar.cli._export import ExportConfig
from mpar.cli._generate import GenerateConfig
from mpar.cli._serve import ServeConfig
from mpar.train import TrainConfig
from tools.pages._blocks import PageError

__all__ = ["check_line", "commands", "lines_of", "printed"]

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "train": TrainConfig,
    "plan": TrainConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
    "serve": ServeConfig,
    "export": ExportConfig,
}
PROGRAMS = frozenset({"cat", "cd", "git", "ls", "mkdir", "mkdocs", "mypy", "pytest", "ruff", "sbatch", "srun", "tensorboard"})
TIMEOUT_S = 300.0
PROMPT = "$ "


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Every command of a `console` block, and what the block shows below it."""
    command, shown = "", ""
    for line in text.splitlines(keepends=True):
        if command.endswith("\\\n"):
            command += line
        elif line.startswith(PROMPT):
            if command:
                yield command, shown
            command, shown = line.removeprefix(PROMPT), ""
        elif not command:
            raise PageError(f"a console block begins with `{PROMPT}command`, not with {line!r}")
        else:
            shown += line
    if command:
        yield command, shown


def lines_of(text: str) -> Iterator[str]:
    """The commands of a `sh` block."""
    for line in text.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            yield line


def printed(command: str) -> str:
    """What a command of a `console` block prints when it is run here, with stderr. Raises PageError if that has a traceback."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[:2] == ["mpar", "plan"]:
        return _run_here(words[1:])[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = re.sub(r"(^|&& *)mpar ", rf"\1{shlex.quote(sys.executable)} -m mpar ", command)
    done = subprocess.run(
        line,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as a terminal shows both
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        encoding="utf-8",
    )
    if "Traceback" in done.stdout:
        raise PageError(f"{command.strip()} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def check_line(line: str) -> None:
    """Run, plan or check a line of a `sh` block. Raises PageError if that fails."""
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)  # variables of the environment
    if words[0] == "pip":
        return _check_extras(words)
    if words[0] == "torchrun" or words[:2] == ["python", "-m"]:
        module, *arguments = words[words.index("-m", 1) + 1 :]
        if module != "mpar":
            return _check_module(module)
        words = ["mpar", *arguments]
    if words[0] != "mpar":
        if words[0] not in PROGRAMS:
            raise PageError(f"cannot check {line!r}: {words[0]} is no program that pages may use ({', '.join(sorted(PROGRAMS))})")
        return None
    _, name, *args = words
    if name not in CONFIGS:
        raise PageError(f"cannot check {line!r}: there is no command mpar {name}")
    stands_for_others = any(re.search(r"\b[A-Z]{3,}\b|\.jsonl", arg) for arg in args)
    only_read = "-m" in args or name in ("generate", "eval", "serve", "export") or stands_for_others
    if only_read:
        return _check_overrides(name, args)
    code, output = _run_here(["plan", *args])
    if code:
        raise PageError(f"{line.strip()}: mpar plan ended with {code}:\n{output}")
    return None


def _check_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise PageError(f"there is no module {name}")


def _run_here(args: Sequence[str]) -> tuple[int, str]:
    """The exit code of `mpar` with these arguments, in this process, and what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command_line.main(list(args))
    return code, output.getvalue()


def _check_overrides(name: str, args: Sequence[str]) -> None:
    """Refuse keys and choices that do not exist. Folders that `--config-dir` names are made, with an experiment `mine`."""
    for place in re.findall(r"--config-dir[= ](\S+)", " ".join(args)):
        (Path(place) / "experiment").mkdir(parents=True, exist_ok=True)
        (Path(place) / "experiment" / "mine.yaml").touch()
    arguments = read_arguments(args)
    command = "train" if name == "plan" else name
    check_overrides(command, CONFIGS[name], arguments.overrides, arguments.user_dir, multirun=arguments.multirun)


def _check_extras(words: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked_for = {extra for word in words for group in re.findall(r"\[(.*?)\]", word) for extra in group.split(",")}
    if unknown := asked_for - extras.keys():
        raise PageError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}; it has {', '.join(extras)}")
