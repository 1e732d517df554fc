"""The program: instructions for every rank, from the compiler to the run. Importing this loads no compiler."""

from mpar.program._program import CollectiveUse, Instruction, Kind, Leaf, Program, Value
from mpar.program._run import RankRun, State, bind, simulate

__all__ = ["CollectiveUse", "Instruction", "Kind", "Leaf", "Program", "RankRun", "State", "Value", "bind", "simulate"]
