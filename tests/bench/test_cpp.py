"""The bench of C++ kernels: each call computes what torch's ops do, and really is another function."""

import pytest

from bench import cpp
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", cpp.LARGEST_ERROR, ids=str)
def test_results_agree_and_lines_are_complete(dtype, monkeypatch):
    """A line for each call, with both times; no call computes without a kernel what it should compute with one."""
    calls = cpp.cases(rows=1, length=128, tokens=(1, 4), dtype=dtype)
    results = cpp.measure(calls, passes=1, turns=1)
    assert [r.text("call") for r in results] == list(calls)
    assert all(r.number("mpar_us") > 0 < r.number("torch_us") for r in results)
    assert len(cpp.table(results).splitlines()) == 2 + len(calls)
    found = []
    for module, name in cpp.KERNELS:
        monkeypatch.setattr(module, name, noting(getattr(module, name), found))
    for name, call in calls.items():
        found.clear()
        call()
        assert any(each is not None for each in found), f"{name}: is there a kernel?"


def noting(function, found):
    """The same function, whose results are added to `found`."""

    def call(*args, **kwargs):
        found.append(function(*args, **kwargs))
        return found[-1]

    return call
