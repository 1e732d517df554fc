"""Ops that mix positions of a sequence: attention with its parts and its ring, the state space scan, the short convolution."""

from mpar.ops.sequence._attention import attention
from mpar.ops.sequence._attention_parts import KeyPart, attention_parts
from mpar.ops.sequence._causal_conv1d import causal_conv1d
from mpar.ops.sequence._merge_attention import merge_attention
from mpar.ops.sequence._ssd_scan import ssd_scan

__all__ = ["KeyPart", "attention", "attention_parts", "causal_conv1d", "merge_attention", "ssd_scan"]
