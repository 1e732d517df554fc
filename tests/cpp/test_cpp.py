"""How C++ kernels come about: compiled once, kept, made again where what is kept is damaged, left out where they cannot be."""

import contextlib
import ctypes
import stat

import pytest

from mpar import cpp
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache without entries; a function that loads kernels as a new process does, and says how often a compiler compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled, count = cpp._compiled, []
    monkeypatch.setattr(cpp, "_compiled", lambda *a: count.append(1) or compiled(*a))

    def load():
        cpp._library.cache_clear()
        cpp.cpp_function.cache_clear()
        count.clear()
        return cpp.cpp_function("rows", "swiglu_float32", 4), len(count)

    yield load
    cpp._library.cache_clear()
    cpp.cpp_function.cache_clear()


def entry(tmp_path):
    """The one file that is kept."""
    (found,) = (tmp_path / "mpar" / "cpp").iterdir()
    return found


def doubled(run):
    """silu(1) * 2, by the kernel."""
    one, two, y = ((ctypes.c_float * 1)(x) for x in (1.0, 2.0, 0.0))
    row = cpp.cpp_structure("Gated", ["rows", "size", "gate_row", "up_row"], [])(1, 1, 1, 1)
    run(*map(ctypes.addressof, (row, one, two, y)))
    return y[0]


def test_what_was_compiled_is_kept(fresh, tmp_path):
    """The second process compiles nothing; an entry that only this user may write is the same code."""
    run, compiled = fresh()
    assert compiled == 1 and doubled(run) == pytest.approx(1.4621172)
    assert not entry(tmp_path).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    run, compiled = fresh()
    assert compiled == 0 and doubled(run) == pytest.approx(1.4621172)


def test_all_kernels_are_prepared_once(fresh, tmp_path):
    """What is missing is told and compiled; then nothing is."""
    told = []

    @contextlib.contextmanager
    def compiling(what):
        told.append(what)
        yield

    fresh()
    cpp.prepare_kernels(compiling)
    assert told == ["this CPU (attention, calls, largest_logits, matmul, paged_attention, products.cpp)"]
    cpp.prepare_kernels(compiling)
    assert len(told) == 1 and len(list((tmp_path / "mpar" / "cpp").iterdir())) == 7
    assert doubled(fresh()[0]) == pytest.approx(1.4621172)


@pytest.mark.parametrize("damage", ["short", "empty", "a bit", "others may write"])
def test_a_damaged_entry_is_made_again(fresh, tmp_path, damage):
    """What is damaged is never loaded, nor what another user may have written."""
    fresh()
    path = entry(tmp_path)
    content = path.read_bytes()
    if damage == "others may write":
        path.chmod(0o666)
    else:
        flipped = content[:500] + bytes([content[500] ^ 1]) + content[501:]
        path.write_bytes({"short": content[:1000], "empty": b"", "a bit": flipped}[damage])
    run, compiled = fresh()
    assert compiled == 1 and doubled(run) == pytest.approx(1.4621172)
    assert path.read_bytes() == content


def test_a_compiler_that_fails_is_warned_of(fresh, tmp_path, monkeypatch):
    """Its words are shown, and there is no kernel."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room for this >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match=r"torch's ops run in place(.|\n)*no room for this"):
        assert fresh()[0] is None


def test_without_a_compiler_there_is_none(fresh, monkeypatch):
    """Nor a warning: torch's ops do the same."""
    monkeypatch.setenv("CXX", "none")
    assert fresh() == (None, 0)


def test_a_folder_that_nobody_can_write(fresh, tmp_path, monkeypatch):
    """Kernels are compiled each time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        run, compiled = fresh()
        assert compiled == 1 and doubled(run) == pytest.approx(1.4621172)
