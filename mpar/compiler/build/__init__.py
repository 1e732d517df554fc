"""Building: the chain, the microbatches and the optimizer become instructions, what they do first, then in which order."""

from mpar.compiler.build._build import build
from mpar.compiler.build._options import BUCKET_BYTES, BatchShape, CompileOptions
from mpar.compiler.build._schedule import Schedule

__all__ = ["BUCKET_BYTES", "BatchShape", "CompileOptions", "Schedule", "build"]
