"""What every test may ask for."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor


@pytest.fixture
def make_tensor() -> Callable[..., Tensor]:
    """`make_tensor(shape, dtype=float32, requires_grad=False)`: normal numbers, the same in every run of a test."""
    generator = torch.Generator().manual_seed(20260101)

    def make(shape: Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

    return make
