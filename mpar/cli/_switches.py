"""What every command answers before it does anything: `--help`, `--version`, `--info` and `--cfg job`."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from mpar.cli._arguments import Arguments
from mpar.cli._compose import compose_plain
from mpar.cli._help import describe_config
from mpar.cli._screen import say
from mpar.conf_dir import conf_dir
from mpar.errors import ConfigError

__all__ = ["answer_switches", "say_info", "say_version"]

_PACKAGES = ("torch", "triton", "hydra-core", "safetensors", "tokenizers", "transformers", "tensorboard", "wandb")


def answer_switches(arguments: Arguments, usage: str, name: str, cls: type, overrides: Sequence[str] | None = None) -> bool:
    """Print what a switch asks for. Returns whether there was one, so that the command has nothing to do.

    overrides: what to compose with, where it is not what the command line says.
    """
    overrides = arguments.overrides if overrides is None else overrides
    if arguments.version:
        say_version()
    elif arguments.info:
        say_info(arguments.user_dir)
    elif arguments.help:
        say(f"{usage}\n\n{describe_config(name, cls, overrides, arguments.user_dir)}")
    elif arguments.cfg:
        if arguments.multirun:
            raise ConfigError("--cfg job prints the configuration of one run: leave out -m, and give one value of each key.")
        composed = compose_plain(name, cls, overrides, arguments.user_dir)
        say(yaml.safe_dump(composed, sort_keys=False, allow_unicode=True).rstrip())
    return arguments.version or arguments.info or arguments.help or arguments.cfg


def say_version() -> None:
    """Print the versions of mpar, Python, torch and Triton in one line."""
    words = (f"{name} {_version(name)}" for name in ("torch", "triton"))
    say(f"mpar {_version('mpar')}, Python {platform.python_version()}, {', '.join(words)}")


def say_info(user_dir: Path | None = None) -> None:
    """Print versions, where the configuration is read from, and what this machine has."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    say_version()
    say(f"packages       {', '.join(f'{name} {_version(name)}' for name in _PACKAGES[2:])}")
    say(f"configuration  {conf_dir()}{'' if user_dir is None else f' and {user_dir}'}")
    say(f"machine        {platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory_bytes / 2**30:.1f} GiB of memory")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
