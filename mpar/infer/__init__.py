"""Inference."""

from mpar.infer._assistant import Answer, Assistant
from mpar.infer._choose import Chosen, History, choose
from mpar.infer._defaults import end_ids, with_defaults
from mpar.infer._engine import Engine, Runner
from mpar.infer._losses import SetLoss, loss_of
from mpar.infer._pages import SPARE_PAGE, PagePool
from mpar.infer._request import Finish, Request
from mpar.infer._row_runner import RowRunner
from mpar.infer._sampling import MAX_ALTERNATIVES, Sampling
from mpar.infer._scheduler import Scheduler, Sizes, Turn
from mpar.infer._scores import Scores
from mpar.infer._tables import Tables
from mpar.infer._tasks import Question, Score, check_task, continuation_logprob, read_task, score_task
from mpar.infer._text import TextStream, num_overlapping

__all__ = [
    "MAX_ALTERNATIVES",
    "SPARE_PAGE",
    "Answer",
    "Assistant",
    "Chosen",
    "Engine",
    "Finish",
    "History",
    "PagePool",
    "Question",
    "Request",
    "RowRunner",
    "Runner",
    "Sampling",
    "Scheduler",
    "Score",
    "Scores",
    "SetLoss",
    "Sizes",
    "Tables",
    "TextStream",
    "Turn",
    "check_task",
    "choose",
    "continuation_logprob",
    "end_ids",
    "loss_of",
    "num_overlapping",
    "read_task",
    "score_task",
    "with_defaults",
]
