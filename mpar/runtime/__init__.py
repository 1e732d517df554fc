"""The runtime: state, the run of one rank, its device and its communication. It loads programs, but not the compiler."""

from mpar.runtime._batch import batch_rows, cut_rows, rows_of
from mpar.runtime._bind import bind
from mpar.runtime._capture import Replay
from mpar.runtime._load import load
from mpar.runtime._rank_run import Progress, RankRun
from mpar.runtime._simulate import simulate
from mpar.runtime._state import State, init_state
from mpar.runtime.comm import ALONE, Comm, Counter, ProcessComm

__all__ = [
    "ALONE",
    "Comm",
    "Counter",
    "ProcessComm",
    "Progress",
    "RankRun",
    "Replay",
    "State",
    "batch_rows",
    "bind",
    "cut_rows",
    "init_state",
    "load",
    "rows_of",
    "simulate",
]
