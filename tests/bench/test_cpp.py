"""The bench of C++ kernels: each call computes what torch's ops do, and really is another function."""

import pytest
import torch

from bench import cpp
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", cpp.LARGEST_ERROR, ids=str)
def test_results_agree_and_lines_are_complete(dtype):
    """A line for each call, with both times; no call computes without a kernel what it should compute with one."""
    calls = cpp.cases(rows=1, length=128, tokens=(1, 4), dtype=dtype)
    results = cpp.measure(calls, passes=1, turns=1)
    assert [r.text("call") for r in results] == list(calls)
    assert all(r.number("mpar_us") > 0 < r.number("torch_us") for r in results)
    assert len(cpp.table(results).splitlines()) == 2 + len(calls)
    for name, call in calls.items():
        by_torch, _ = cpp._by_torch(call)
        differ = any(not a.equal(b) for a, b in zip(call(), by_torch, strict=True))
        assert differ or dtype == torch.bfloat16, f"{name}: is there a kernel?"
