"""The runtime: state, the run of one rank, its device and its communication. It loads programs, but not the compiler."""

from mpar.runtime._batch import batch_rows, cut_rows, positions_in_order, rows_of
from mpar.runtime._bind import bind, check_inductor
from mpar.runtime._capture import Replay
from mpar.runtime._cpp_calls import cpp_calls
from mpar.runtime._load import load
from mpar.runtime._rank_run import Progress, RankRun
from mpar.runtime._simulate import simulate
from mpar.runtime._state import NO_LIMITS, Limits, State, init_state
from mpar.runtime.comm import ALONE, Comm, Counter, ProcessComm, exchange

__all__ = [
    "ALONE",
    "NO_LIMITS",
    "Comm",
    "Counter",
    "Limits",
    "ProcessComm",
    "Progress",
    "RankRun",
    "Replay",
    "State",
    "batch_rows",
    "bind",
    "check_inductor",
    "cpp_calls",
    "cut_rows",
    "exchange",
    "init_state",
    "load",
    "positions_in_order",
    "rows_of",
    "simulate",
]
