"""Inference."""

from mpar.infer._assistant import Answer, Assistant
from mpar.infer._choose import Chosen, History, choose
from mpar.infer._defaults import end_ids, with_defaults
from mpar.infer._engine import Engine, Runner
from mpar.infer._generate import generate
from mpar.infer._pages import SPARE_PAGE, PagePool
from mpar.infer._request import Finish, Request
from mpar.infer._row_runner import RowRunner
from mpar.infer._sampling import Sampling
from mpar.infer._scheduler import Scheduler, Sizes, Turn
from mpar.infer._text import TextStream

__all__ = [
    "SPARE_PAGE",
    "Answer",
    "Assistant",
    "Chosen",
    "Engine",
    "Finish",
    "History",
    "PagePool",
    "Request",
    "RowRunner",
    "Runner",
    "Sampling",
    "Scheduler",
    "Sizes",
    "TextStream",
    "Turn",
    "choose",
    "end_ids",
    "generate",
    "with_defaults",
]
