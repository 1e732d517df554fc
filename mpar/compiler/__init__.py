"""The compiler: from a model, a mesh and a strategy to a program as data. Ranks that run a program never load it."""

from mpar.compiler.build import BUCKET_BYTES, BatchShape, CompileOptions, Schedule, build
from mpar.compiler.segment import RecomputePolicy, choose_kernels, generate, policy, positions_of

__all__ = [
    "BUCKET_BYTES",
    "BatchShape",
    "CompileOptions",
    "RecomputePolicy",
    "Schedule",
    "build",
    "choose_kernels",
    "generate",
    "policy",
    "positions_of",
]
