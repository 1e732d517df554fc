"""Segments: every function of the chain, traced once per kind, lowered for the mesh, cut into forward and backward, made code."""

from mpar.compiler.segment._code import Code, SegmentCode, SegmentSpecs, Slices, Target, TracedSegment
from mpar.compiler.segment._codegen import generate, positions_of
from mpar.compiler.segment._compile import compile_function, compile_segment
from mpar.compiler.segment._kernels import choose_kernels
from mpar.compiler.segment._partition import RecomputePolicy, policy
from mpar.compiler.segment._reuse import overwrite_operands
from mpar.compiler.segment._split import SplitCode, split_segment
from mpar.compiler.segment._trace import trace_segment

__all__ = [
    "Code",
    "RecomputePolicy",
    "SegmentCode",
    "SegmentSpecs",
    "Slices",
    "SplitCode",
    "Target",
    "TracedSegment",
    "choose_kernels",
    "compile_function",
    "compile_segment",
    "generate",
    "overwrite_operands",
    "policy",
    "positions_of",
    "split_segment",
    "trace_segment",
]
