"""C++: kernels for a CPU, for what torch does slowly or in many calls. The first process that needs one compiles it."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from importlib import resources
from pathlib import Path
from typing import cast

import torch

from mpar.cpp._calls import MOST_OPERANDS, Calls, Operand, address_of, after_calls, assume, calls_of_thread
from mpar.errors import ConfigError
from mpar.kept_files import KeptFiles, NotUsableError
from mpar.user_cache import user_cache

__all__ = [
    "MOST_OPERANDS",
    "Calls",
    "Operand",
    "after_calls",
    "assume",
    "calls_of_thread",
    "cpp_function",
    "cpp_structure",
    "new_calls",
    "prepare_kernels",
]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_VECTORS = ("AVX2", "AVX512")
_MOST_ENTRIES, _MOST_BYTES, _TIMEOUT_S = 32, 2**26, 300


@functools.cache
def cpp_function(library: str, function: str, num_operands: int) -> Callable[..., None] | None:
    """A function of `library`.cpp, which gets the addresses of its operands (`Operand`).

    None where it cannot be compiled or is not worth it: torch's ops do the same. That is so on a CPU without AVX2 or AVX-512,
    without a C++ compiler (the one that CXX names, or g++), and, with a warning, if the compiler fails.
    """
    loaded = _library(library)
    if loaded is None:
        return None
    found = getattr(loaded, function)
    found.argtypes, found.restype = [ctypes.c_void_p] * num_operands, None
    address = cast(int, ctypes.cast(found, ctypes.c_void_p).value)

    def call(*operands: Operand) -> None:
        calls = calls_of_thread()
        if calls is None:
            found(*map(address_of, operands))
        else:
            calls.add(address, operands)

    return call


def new_calls() -> Calls | None:
    """Where calls of functions of C++ can be written down; None where there are no such functions."""
    run = cpp_function("calls", "run_calls", 3)
    return None if run is None else Calls(run)


def cpp_structure(name: str, numbers: Sequence[str], floats: Sequence[str]) -> type[ctypes.Structure]:
    """A class for a structure of int64 and, behind them, float members; `ctypes.addressof` gives the address of an object."""
    fields = [*((field, ctypes.c_int64) for field in numbers), *((field, ctypes.c_float) for field in floats)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def prepare_kernels(compiling: Callable[[str], AbstractContextManager[None]]) -> None:
    """Compile the kernels that are not kept, side by side. Otherwise the first op that needs one waits for it. compiling: stands
    around the work, if there is any, and is told in words what is compiled."""
    compiler, kept = _compiler(), _kept()
    names = [] if compiler is None else [name.removesuffix(".cpp") for name in _sources() if name.endswith(".cpp")]
    try:
        missing = [name for name in names if _kept_code(_key(name, compiler or []), kept) is None]
    except (subprocess.SubprocessError, OSError):
        return  # who needs a kernel is told why there is none
    if missing:
        with compiling(f"this CPU ({', '.join(sorted(missing))}.cpp)"), ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(_library, missing))


@functools.cache
def _library(name: str) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        key, kept = _key(name, compiler), _kept()
        content = _kept_code(key, kept)
        if content is None:
            content = _compiled(name, _sources(), compiler)
            if kept is not None:
                with suppress(NotUsableError, OSError):
                    kept.write(key, hashlib.sha256(content).digest() + content)
        return _loaded(name, content)
    except (subprocess.SubprocessError, OSError) as error:
        said = f"cannot compile {name}.cpp with {shlex.join(compiler)}:\n{getattr(error, 'stderr', None) or error}"
        warnings.warn(f"torch's ops run in place of mpar's C++ kernels: {said}", stacklevel=2)
        return None


def _compiler() -> list[str] | None:
    """The command of the compiler; None without one, or on a CPU for which there are no kernels."""
    words = shlex.split(os.environ.get("CXX") or "g++")
    found = shutil.which(words[0]) if words else None
    return None if found is None or torch.backends.cpu.get_cpu_capability() not in _VECTORS else [found, *words[1:]]


def _sources() -> dict[str, bytes]:
    files = resources.files(__package__).iterdir()
    return {file.name: file.read_bytes() for file in files if file.name.endswith((".cpp", ".h"))}


def _key(name: str, compiler: Sequence[str]) -> str:
    """The name under which the code of a library is kept, which depends on everything that it is made of."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_S).stdout
    about = repr((name, sorted(_sources().items()), compiler, version, _FLAGS, _cpu()))
    return hashlib.sha256(about.encode()).hexdigest()


def _kept() -> KeptFiles | None:
    try:
        return KeptFiles(user_cache() / "cpp", ".so", _MOST_ENTRIES, _MOST_BYTES)
    except ConfigError:  # this user has no folder for caches
        return None


def _kept_code(key: str, kept: KeptFiles | None) -> bytes | None:
    if kept is not None:
        with suppress(NotUsableError, OSError):
            checksum, content = _split(kept.read(key))
            if hashlib.sha256(content).digest() == checksum:
                return content
    return None


def _split(entry: bytes) -> tuple[bytes, bytes]:
    """The checksum of an entry, and what it is of: code that is damaged could end the process."""
    return entry[: hashlib.sha256().digest_size], entry[hashlib.sha256().digest_size :]


def _compiled(name: str, sources: dict[str, bytes], compiler: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for file, content in sources.items():
            Path(folder, file).write_bytes(content)
        command = [*compiler, *_FLAGS, f"{name}.cpp", "-o", "made.so"]
        subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S)
        return Path(folder, "made.so").read_bytes()


def _loaded(name: str, content: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.so")
        path.write_bytes(content)
        return ctypes.CDLL(str(path))


def _cpu() -> str:
    """What code for this CPU depends on: a folder for caches may be of several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
