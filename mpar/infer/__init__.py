"""Inference."""

from mpar.infer._choose import Chosen, History, choose
from mpar.infer._compile import compile_decode
from mpar.infer._engine import Engine, Runner
from mpar.infer._generate import generate
from mpar.infer._pages import SPARE_PAGE, PagePool
from mpar.infer._program_runner import ProgramRunner
from mpar.infer._request import Finish, Request
from mpar.infer._row_runner import RowRunner
from mpar.infer._sampling import Sampling
from mpar.infer._scheduler import Scheduler, Sizes, Turn
from mpar.infer._text import TextStream

__all__ = [
    "SPARE_PAGE",
    "Chosen",
    "Engine",
    "Finish",
    "History",
    "PagePool",
    "ProgramRunner",
    "Request",
    "RowRunner",
    "Runner",
    "Sampling",
    "Scheduler",
    "Sizes",
    "TextStream",
    "Turn",
    "choose",
    "compile_decode",
    "generate",
]
