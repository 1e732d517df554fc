"""The part of this package that compiles; `mpar.program` itself only runs, so that workers stay small."""

from mpar.compiler.build._build import compile_eval, compile_step
from mpar.program._diff import Hunk, ProgramDiff, diff
from mpar.program._jit import Compiled, Lowered, jit, value_and_grad
from mpar.compiler.segment._partition import RecomputePolicy, policy
from mpar.compiler.build._stages import Schedule

__all__ = [
    "Compiled",
    "Hunk",
    "Lowered",
    "ProgramDiff",
    "RecomputePolicy",
    "Schedule",
    "compile_eval",
    "compile_step",
    "diff",
    "jit",
    "policy",
    "value_and_grad",
]
