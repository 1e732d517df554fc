"""SwiGLU: forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy
from bench.kernels.rows._liger import NOT_INSTALLED, liger
from mpar.kernels import implementation
from tools.kernel_shapes import GATE

__all__ = ["ROWS"]

ROWS_CHECKED = 64


def forward(setting: Setting, *, M: int, F: int) -> Built:
    """silu(gate) * up."""
    gate, up = setting.normal(M, F), setting.normal(M, F)
    compiled, fused = setting.compiled(_product), liger("ops.swiglu", "LigerSiLUMulFunction")
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _product(gate, up), _rows),
        "torch.compile": Variant(lambda: compiled(gate, up), _rows),
        "liger": NOT_INSTALLED if fused is None else Variant(lambda: fused.apply(gate, up), _rows),
    }
    ours = Variant(lambda: implementation("swiglu", "triton")(gate, up), _rows)
    return Built(ours, peers, lambda: _rows(_product(gate[:ROWS_CHECKED].double(), up[:ROWS_CHECKED].double())), 3 * gate.nbytes)


def backward(setting: Setting, *, M: int, F: int) -> Built:
    """Gradients of gate and up."""
    gate, up, dy = (setting.normal(M, F) for _ in range(3))
    compiled = setting.compiled(_gradients)
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    made = _product(*leaves)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: torch.autograd.grad(made, leaves, dy, retain_graph=True), _each),
        "torch.compile": Variant(lambda: compiled(gate, up, dy), _each),
    }
    ours = Variant(lambda: implementation("swiglu_bwd", "triton")(gate, up, dy), _each)
    first = [x[:ROWS_CHECKED].double() for x in (gate, up, dy)]
    return Built(ours, peers, lambda: _gradients(*first), 5 * gate.nbytes)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), dy.to(wide)
    share = torch.sigmoid(g)
    return (d * u * share * (1 + g * (1 - share))).to(gate.dtype), (d * g * share).to(up.dtype)


def _rows(y: Tensor) -> list[Tensor]:
    return [y[:ROWS_CHECKED]]


def _each(grads: Any) -> list[Tensor]:
    return [x[:ROWS_CHECKED] for x in grads]


ROWS = [
    Row(12, "swiglu fwd", forward, GATE, [of_copy(0.92)]),
    Row(12, "swiglu bwd", backward, GATE, [of_copy(0.90)]),
]
