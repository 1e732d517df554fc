"""The program: instructions for every rank, from the compiler to the run. Importing this loads no compiler."""

from mpar.runtime._capture import Replay
from mpar.runtime.comm._comm import Counter
from mpar.ir._kernels import describe_kernels
from mpar.forecast._predict import Hardware, Prediction
from mpar.program._program import CollectiveUse, Instruction, Kind, Leaf, Program, Value
from mpar.runtime._run import RankRun, State, batch_rows
from mpar.program._text import format_bytes, format_time

__all__ = [
    "CollectiveUse",
    "Counter",
    "Hardware",
    "Instruction",
    "Kind",
    "Leaf",
    "Prediction",
    "Program",
    "RankRun",
    "Replay",
    "State",
    "Value",
    "batch_rows",
    "describe_kernels",
    "format_bytes",
    "format_time",
]
