"""Where C++ kernels are tested: on a CPU with AVX2 or AVX-512, if there is a compiler. There they must be."""

import os
import shutil

import pytest
import torch

__all__ = ["needs_kernels"]

_HAS_COMPILER = shutil.which(os.environ.get("CXX") or "g++") is not None
needs_kernels = pytest.mark.skipif(
    not _HAS_COMPILER or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="needs a C++ compiler, and a CPU with AVX2 or AVX-512",
)
"""A mark. It does not ask whether kernels are there: that they cannot be compiled is a failure."""
