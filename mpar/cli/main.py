"""`mpar COMMAND group=choice key=value`: finds and runs the command, and turns errors into a screen of text and an exit code."""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from mpar.cli import _screen
from mpar.cli._signals import Stopped, signals_stop
from mpar.cli._switches import say_info, say_version
from mpar.errors import ConfigError, MparError, UnknownNameError, exit_code
from mpar.exit_codes import code_of_signal
from mpar.user_cache import user_cache

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "train": ("mpar.cli._train", "train a model (task=pt or task=sft) on processes of this machine, or under torchrun"),
    "plan": ("mpar.cli._plan", "compile and verify a run, and predict its time and memory, without processes or weights"),
    "measure": ("mpar.cli._measure", "measure this machine, and write a hardware profile by which `plan` predicts"),
    "generate": ("mpar.cli._generate", "let a trained model answer questions"),
    "serve": ("mpar.cli._serve", "serve a trained model to OpenAI's clients, with a page to talk to it"),
    "eval": ("mpar.cli._eval", "the loss of a trained model on whole sets, and how many questions it answers right"),
    "data": ("mpar.cli._data", "show the rows that a run would train on, and what the data are like"),
    "preprocess": ("mpar.cli._preprocess", "tokenise text once, into files that `train` and Megatron read"),
    "export": ("mpar.cli._export", "write a checkpoint as a folder that transformers loads"),
    "rollouts": ("mpar.cli._rollouts", "show the answers that a run with task=grpo drew, and how their rewards went"),
    "checkpoint": ("mpar.cli._checkpoint", "verify, show, compare and convert checkpoints"),
}
_USAGE = """usage: mpar COMMAND [group=choice] [key=value] ...

{commands}

  mpar train                                     a small model learns its name, on two processes
  mpar train strategy=zero3 mesh=fsdp2 steps=20  the same model with other parallelism
  mpar train -m optimizer.lr=1e-3,3e-3           a sweep: one run after the other, each in its own folder
  mpar plan model=llama3_405b strategy=zero3_tp mesh.fsdp=2048 mesh.tp=8
  mpar COMMAND --help                            the groups, choices and keys of a command"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    _screen.encode_everything()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            _screen.say(_USAGE.format(commands="\n".join(f"  {name:10} {about}" for name, (_, about) in COMMANDS.items())))
            return 0
        if args[0] in ("-V", "--version", "-i", "--info"):
            (say_version if args[0] in ("-V", "--version") else say_info)()
            return 0
        _check_working_directory()
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # torch's own choice is a folder in /tmp that everybody can guess
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache() / "inductor")
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's: tensors of 2 MB lie in large pages, which are read faster
        with signals_stop():
            return importlib.import_module(_module(args[0])).main(args[1:])
    except MparError as error:
        _screen.show_error(error)
        return exit_code(error)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough of it
        _screen.give_output_up()
        return code_of_signal(signal.SIGPIPE)
    except OSError as error:
        _screen.show_error(error)
        return 1
    except Stopped as stopped:
        _screen.say_aside(str(stopped))
        return stopped.code


def _check_working_directory() -> None:
    try:
        os.getcwd()  # libraries end the process without it
    except FileNotFoundError:
        raise ConfigError("the working directory does not exist any more: change to one that does.") from None


def _module(command: str) -> str:
    """The module that runs a command. A process of torchrun gets one that does not import the launcher and the compiler."""
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
        raise UnknownNameError(f"there is no command {command!r}; did you mean {near!r}?\nCommands: {', '.join(COMMANDS)}.")
    if command == "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        return "mpar.cli._torchrun"
    return COMMANDS[command][0]
