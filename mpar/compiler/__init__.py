"""The compiler: it makes a program, as data, of a model, a mesh and a strategy. Ranks that run a program do not import it."""

from mpar.compiler.build import BUCKET_BYTES, BatchShape, CompileOptions, Schedule, build
from mpar.compiler.segment import RecomputePolicy, choose_kernels, coordinates_of, generate, policy

__all__ = [
    "BUCKET_BYTES",
    "BatchShape",
    "CompileOptions",
    "RecomputePolicy",
    "Schedule",
    "build",
    "choose_kernels",
    "coordinates_of",
    "generate",
    "policy",
]
