"""Checks of kernels run where the kernels run: on a GPU where there is one, else on the CPU in Triton's interpreter."""

import pytest
import torch

from tools.triton_interpreter import install

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    install()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run."""
    return DEVICE
