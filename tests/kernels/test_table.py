"""Every entry of the table of launches, as production calls it, on a GPU: what compilers miscompile shows only there."""

import gc
from collections.abc import Iterator

import pytest
import torch

from mpar.kernels import ARCHITECTURES, kernels_for
from tools.checked_kernels import checked, make_on
from tools.kernel_gate import all_cases, calling

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """What a case held is given back."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_agrees_with_float64_and_with_itself(case):
    """Results are the reference's in float64, and the same bits in a second run."""
    arch = kernels_for("auto", "cuda").arch
    assert arch in ARCHITECTURES, f"there are no kernels for {arch}"
    if case.archs and arch not in case.archs:
        return
    with calling(checked):
        case.run(make_on("cuda"))
