"""Ops that mix positions of a sequence: attention with its parts, ring and pages, the state space scan, the convolution."""

from mpar.ops.sequence._attention import attention
from mpar.ops.sequence._attention_parts import KeyPart, attention_parts
from mpar.ops.sequence._by_rows import conv_by_rows, scan_by_rows
from mpar.ops.sequence._causal_conv1d import causal_conv1d
from mpar.ops.sequence._merge_attention import merge_attention
from mpar.ops.sequence._paged_attention import paged_attention
from mpar.ops.sequence._ssd_scan import ssd_scan
from mpar.ops.sequence._write_rows import write_rows

__all__ = [
    "KeyPart",
    "attention",
    "attention_parts",
    "causal_conv1d",
    "conv_by_rows",
    "merge_attention",
    "paged_attention",
    "scan_by_rows",
    "ssd_scan",
    "write_rows",
]
