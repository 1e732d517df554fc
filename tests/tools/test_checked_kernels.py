"""The check of production's calls, on small ones: it passes kernels that are right, and no others."""

import pytest
import torch

from mpar.kernels import _choose
from tools import checked_kernels as module
from tools.checked_kernels import checked, make_on


def call_swiglu(device):
    """A small call."""
    make = make_on(device)
    return checked("swiglu")(make((3, 40)), make((3, 40)))


def test_right_kernels_pass(device):
    """SwiGLU forward and backward, attention with sinks and documents by its first head."""
    make = make_on(device)
    assert call_swiglu(device).shape == (3, 40)
    checked("swiglu_bwd")(*(make((3, 40)) for _ in range(3)))
    q, k, v = make((2, 20, 4, 64)), make((2, 20, 2, 64)), make((2, 20, 2, 64))
    ids = make((2, 20), torch.int32).sort(1).values // 30
    params = {"causal": True, "window": None, "scale": 0.1, "soft_cap": None}
    masks = (None, None, ids, ids, make((4,)))
    out, lse = checked("attention")(q, k, v, *masks, **params)
    checked("attention_bwd")(q, k, v, *masks, out, lse, make((2, 20, 4, 64)), None, **params)


def test_rounded_logits_pass(device):
    """Losses of a head in bfloat16 are float32 numbers of rounded logits."""
    make = make_on(device)
    params = {"ignore_index": -100, "vocab_size": 104, "start": 0, "label_smoothing": 0.0, "chunk": 6}
    head, labels, dloss = make((32, 104)) * 32**-0.5, make((6,), torch.int64), make((6,), torch.float32)
    checked("linear_cross_entropy_grad")(make((6, 32)), head, labels, dloss, **params)


def broken(monkeypatch, change):
    """SwiGLU's kernel with `change` of what it gives."""
    real = _choose.implementation
    monkeypatch.setattr(
        module,
        "implementation",
        lambda primitive, name="reference": (
            (lambda *x: change(real(primitive, name)(*x))) if name == "triton" else real(primitive)
        ),
    )


def test_wrong_kernels_do_not(device, monkeypatch):
    """Five percent too much is found."""
    broken(monkeypatch, lambda y: y * 1.05)
    with pytest.raises(AssertionError, match="swiglu: result 0: relative error"):
        call_swiglu(device)


def test_other_bits_are_found(device, monkeypatch):
    """A last bit that changes from run to run is a race."""
    flips = iter([0.0, 1e-2])
    broken(monkeypatch, lambda y: y + next(flips))
    with pytest.raises(AssertionError, match="other bits"):
        call_swiglu(device)
