"""Kernels run in Triton's interpreter here, on CPU tensors; tests marked `gpu` run them on a GPU."""

from tests.kernels.interpreter import install

install()
