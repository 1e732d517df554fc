"""C++: kernels for a CPU, for what torch does in many calls. They are compiled where they first run, as code for Inductor is."""

import ctypes
import functools
from collections.abc import Callable, Mapping
from importlib import import_module, resources

from mpar.torch_private import compile_cpp

__all__ = ["cpp_kernel", "cpp_library"]

_KERNELS: Mapping[str, str] = {"paged_attention": "mpar.kernels._paged_attention_cpp"}
"""The module that has the kernel of a primitive, called like it. It carries out every call: those that C++ does not support, the
primitive's own implementation does."""


def cpp_kernel(primitive: str) -> Callable[..., object] | None:
    """The function that carries out a primitive on a CPU with a C++ compiler; None if there is none but its own implementation."""
    return getattr(import_module(_KERNELS[primitive]), primitive) if primitive in _KERNELS else None


@functools.cache
def cpp_library(name: str) -> ctypes.CDLL:
    """The functions of `name`.cpp."""
    return compile_cpp((resources.files(__package__) / "cpp" / f"{name}.cpp").read_text())
