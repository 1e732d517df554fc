"""Kernels: implementations of primitives in Triton, and the choice among implementations. Only running a kernel needs Triton."""

from mpar.kernels._arch import ARCHITECTURES, Architecture
from mpar.kernels._catalogue import CATALOGUE, REFERENCE_WORKSPACE, Implementation
from mpar.kernels._choose import KERNELS, REFERENCE, Kernels, choose, implementation, kernels_for
from mpar.kernels._eager import install
from mpar.kernels._own import check_kernels, def_kernel

__all__ = [
    "ARCHITECTURES",
    "CATALOGUE",
    "KERNELS",
    "REFERENCE",
    "REFERENCE_WORKSPACE",
    "Architecture",
    "Implementation",
    "Kernels",
    "check_kernels",
    "choose",
    "def_kernel",
    "implementation",
    "kernels_for",
]

install()
