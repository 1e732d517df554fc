"""The processes of ranks: what their environment says."""

import subprocess

import pytest

from mpar.cli import _ranks


@pytest.mark.parametrize("own", [None, "glibc.malloc.perturb=1"])
def test_ranks_have_large_pages_unless_the_user_sets_tunables(own, tmp_path, monkeypatch):
    """Every rank has the tunable of large pages, or the user's own value; numbers and interfaces are there in any case."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    environments = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, *, env, **_: environments.append(env))
    _ranks.Ranks(2, (), (), tmp_path)
    assert [env["GLIBC_TUNABLES"] for env in environments] == [own or "glibc.malloc.hugetlb=1"] * 2
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert all(env["GLOO_SOCKET_IFNAME"] == "lo" for env in environments)
