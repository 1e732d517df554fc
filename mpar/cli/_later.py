"""Modules that need torch are imported when nothing is wrong with the command line: refusing it takes less time than that."""

import importlib
from types import ModuleType

from mpar.cli._signals import Stopped, signals_call

__all__ = ["later"]


def later(module: str) -> ModuleType:
    """The module of this name. Raises Stopped if a signal has come meanwhile, but only once the module is loaded: half of torch
    could not be loaded again."""
    asked: list[int] = []
    with signals_call(asked.append):
        loaded = importlib.import_module(module)
    if asked:
        raise Stopped(asked[0])
    return loaded
