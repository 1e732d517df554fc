"""The program: instructions for every rank, from the compiler to the run. Importing this loads no compiler."""

from mpar.program._comm import Counter
from mpar.program._predict import Hardware, Prediction
from mpar.program._program import CollectiveUse, Instruction, Kind, Leaf, Program, Value
from mpar.program._run import RankRun, State

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
    "State",
    "Value",
]
