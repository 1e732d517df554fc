"""The program: instructions for every rank, to print, prove, predict, simulate and run. Importing it loads no compiler."""

from mpar.forecast import Prediction
from mpar.hardware import Hardware
from mpar.ir import CollectiveUse, Instruction, Kind, Leaf, Part, Value
from mpar.program._diff import Hunk, ProgramDiff, diff
from mpar.program._kernels import describe_kernels
from mpar.program._program import Program
from mpar.program._text import format_bytes, format_time, parameters_in_words
from mpar.proof import in_order
from mpar.runtime import (
    NO_LIMITS,
    Counter,
    Limits,
    RankRun,
    Replay,
    State,
    batch_rows,
    check_inductor,
    cpp_calls,
    cut_rows,
    exchange,
    positions_in_order,
    rows_of,
)

__all__ = [
    "NO_LIMITS",
    "CollectiveUse",
    "Counter",
    "Hardware",
    "Hunk",
    "Instruction",
    "Kind",
    "Leaf",
    "Limits",
    "Part",
    "Prediction",
    "Program",
    "ProgramDiff",
    "RankRun",
    "Replay",
    "State",
    "Value",
    "batch_rows",
    "check_inductor",
    "cpp_calls",
    "cut_rows",
    "describe_kernels",
    "diff",
    "exchange",
    "format_bytes",
    "format_time",
    "in_order",
    "parameters_in_words",
    "positions_in_order",
    "rows_of",
]
