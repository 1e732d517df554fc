"""What every test may ask for."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cpu import cpu_variables

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, and so do the processes that tests start
os.environ.update(cpu_variables(os.environ.get("ATEN_CPU_CAPABILITY")))
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports a kernel: without a GPU they run in the interpreter

pytest_plugins = ["tests.tiers"]


@pytest.fixture(scope="session", autouse=True)
def _caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that tests compile are not kept in the folder of the user; what matplotlib knows of fonts stays where it is."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "matplotlib")))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def make_tensor() -> Callable[..., Tensor]:
    """`make_tensor(shape, dtype=float32, requires_grad=False)`: normal numbers, the same in every run of a test."""
    generator = torch.Generator().manual_seed(20260101)

    def make(shape: Sequence[int], dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

    return make
