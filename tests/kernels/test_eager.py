"""Ops on tensors of a GPU take kernels, by the choice that programs make."""

import torch

from mpar import ops, testing
from mpar.kernels import CATALOGUE, Kernels, _eager
from mpar.ops import PRIMITIVES


def test_ops_choose_by_their_operands(monkeypatch, make_tensor):
    """On a chip with kernels a float32 call goes to Triton, a float64 one to the reference."""
    monkeypatch.setattr(_eager, "_kernels", lambda device: Kernels("auto", "sm_90"))
    chosen = []
    find = _eager.implementation
    monkeypatch.setattr(_eager, "implementation", lambda primitive, name: chosen.append(name) or find(primitive, name))
    gate, up = make_tensor((3, 5)), make_tensor((3, 5))
    actual = _eager.eager("swiglu")(gate, up)
    testing.assert_close(actual, ops.swiglu(gate.double(), up.double()))
    _eager.eager("swiglu")(gate.double(), up.double())
    assert chosen == ["triton", "reference"]


def test_every_primitive_with_kernels_is_dispatched():
    """torch knows an implementation for CUDA of each."""
    for name in CATALOGUE:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mpar::{name}", "CUDA"), name
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("mpar::embedding", "CUDA")
    assert "embedding" in PRIMITIVES
