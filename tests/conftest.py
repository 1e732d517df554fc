"""What every test may ask for."""

import os
import tempfile
from collections.abc import Callable, Sequence

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, and so do the processes that tests start
CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY")
if CAPABILITY is not None:  # Inductor does not tell cached code by it, and would load what was compiled for another one
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{CAPABILITY}")
if CAPABILITY in ("default", "avx2"):
    # Torch packs bfloat16 as oneDNN finds the CPU, and refuses then what ATen was told not to use: both are told the same.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports a kernel: without a GPU they run in the interpreter

pytest_plugins = ["tests.tiers"]


@pytest.fixture
def make_tensor() -> Callable[..., Tensor]:
    """`make_tensor(shape, dtype=float32, requires_grad=False)`: normal numbers, the same in every run of a test."""
    generator = torch.Generator().manual_seed(20260101)

    def make(shape: Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

    return make
