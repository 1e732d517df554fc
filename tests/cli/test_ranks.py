"""The processes of ranks: what their environment says."""

import os
import subprocess
import sys

import pytest

from mpar.cli import _ranks


@pytest.mark.parametrize("own", [None, "glibc.malloc.perturb=1"])
def test_ranks_keep_their_memory_unless_the_user_sets_tunables(own, tmp_path, monkeypatch):
    """Every rank has the tunables of memory, or the user's own value; numbers and interfaces are there in any case."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    environments = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, *, env, **_: environments.append(env))
    _ranks.Ranks(2, (), (), tmp_path)
    assert [env["GLIBC_TUNABLES"] for env in environments] == [own or _ranks.MALLOC["GLIBC_TUNABLES"]] * 2
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert all(env["GLOO_SOCKET_IFNAME"] == "lo" for env in environments)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_memory_that_is_given_back_is_taken_again_without_page_faults():
    """glibc understands the tunables: without them, each of these blocks is faulted in again, page by page."""
    program = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size, faults = 16 << 20, []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    faults = [
        int(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout)
        for env in (plain, plain | _ranks.MALLOC)
    ]
    assert faults[1] < 10 < 1000 < faults[0], faults
