"""Building: the instructions of a step are written for every position along pp. First what is done, then in which order."""

from mpar.compiler.build._build import build
from mpar.compiler.build._options import BUCKET_BYTES, BatchShape, CompileOptions
from mpar.compiler.build._schedule import Schedule

__all__ = ["BUCKET_BYTES", "BatchShape", "CompileOptions", "Schedule", "build"]
