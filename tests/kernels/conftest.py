"""Kernels run in Triton's interpreter here, on CPU tensors, and on a GPU where there is one; tests marked `gpu` need one."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tools.triton_interpreter import install

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    install()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: "cuda" where there is a GPU, else "cpu", in the interpreter."""
    return DEVICE


@pytest.fixture
def make_tensor(device: str) -> Callable[..., Tensor]:
    """`make_tensor(shape, dtype=float32, requires_grad=False)`: normal numbers on `device`, the same in every run of a test."""
    generator = torch.Generator().manual_seed(20260101)

    def make(shape: Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return numbers.to(device).requires_grad_(requires_grad)

    return make
