"""Segments: the functions of the chain become code. Each is traced, lowered for the mesh, cut in two and written as Python."""

from mpar.compiler.segment._code import Code, SegmentCode, SegmentSpecs, Slices, Target, TracedSegment
from mpar.compiler.segment._codegen import coordinates_of, generate
from mpar.compiler.segment._compile import compile_function, compile_segment
from mpar.compiler.segment._join import join_codes
from mpar.compiler.segment._kernels import choose_kernels
from mpar.compiler.segment._partition import RecomputePolicy, check_names, policy
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
    "check_names",
    "choose_kernels",
    "compile_function",
    "compile_segment",
    "coordinates_of",
    "generate",
    "join_codes",
    "overwrite_operands",
    "policy",
    "split_segment",
    "trace_segment",
]
