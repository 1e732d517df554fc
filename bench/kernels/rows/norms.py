"""RMS norm of the sum with the residual stream: forward and backward."""

import functools
from typing import Any

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy, times
from bench.kernels.rows._liger import NOT_INSTALLED, liger
from mpar.kernels import implementation
from tools.kernel_shapes import NORMS

__all__ = ["ROWS"]

EPS = 1e-6
CHECKED = 256


def forward(setting: Setting, *, M: int, N: int) -> Built:
    """The normalised sum, and the sum."""
    x, residual, weight = setting.normal(M, N), setting.normal(M, N), setting.normal(N)
    compiled, fused = setting.compiled(_add_norm), _liger()
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _add_norm(x, residual, weight), _rows),
        "torch.compile": Variant(lambda: compiled(x, residual, weight), _rows),
        "liger": NOT_INSTALLED if fused is None else Variant(lambda: fused(x, residual, weight), _rows),
    }
    ours = Variant(lambda: implementation("add_rms_norm", "triton")(x, residual, weight, eps=EPS), _rows)
    small = [x[:CHECKED].double(), residual[:CHECKED].double(), weight.double()]
    return Built(ours, peers, lambda: [_add_norm(*small)[0], (x + residual)[:CHECKED].double()], 4 * x.nbytes + weight.nbytes)


def backward(setting: Setting, *, M: int, N: int) -> Built:
    """The gradients of the sum's operands and of the gain, from the gradients of both results."""
    x, residual, dy, dtotal = (setting.normal(M, N) for _ in range(4))
    weight = setting.normal(N)
    total = x + residual
    compiled, fused = setting.compiled(_gradients), _liger()
    leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_(), weight.clone().requires_grad_()]
    peers: dict[str, Variant | str] = {
        "eager": _pull_back(_add_norm, leaves, dy, dtotal),
        "torch.compile": Variant(lambda: compiled(total, weight, dy, dtotal), _slices),
        "liger": NOT_INSTALLED if fused is None else _pull_back(fused, leaves, dy, dtotal),
    }
    ours = Variant(lambda: implementation("add_rms_norm_bwd", "triton")(total, weight, dy, dtotal, eps=EPS), _slices)

    def reference() -> list[Tensor]:
        parts = [
            _gradients(*(t[i : i + CHECKED].double() if t.ndim == 2 else t.double() for t in (total, weight, dy, dtotal)))
            for i in range(0, M, CHECKED)
        ]
        return [parts[0][0], torch.stack([dweight for _, dweight in parts]).sum(0)]

    return Built(ours, peers, reference, 4 * x.nbytes + 2 * weight.nbytes)


def _liger() -> Any | None:
    fused = liger("ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    if fused is None:
        return None
    return lambda x, residual, weight: fused.apply(x, residual, weight, EPS, 0.0, "llama", False)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y * weight, total


def _gradients(total: Tensor, weight: Tensor, dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(total.dtype, torch.float32)
    x, w, d = total.to(wide), weight.to(wide), dy.to(wide)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    slope = (d * w * x).mean(-1, keepdim=True) * rstd.square()
    dx = rstd * (d * w - x * slope) + dtotal.to(wide)
    return dx.to(total.dtype), (d * x * rstd).sum(0).to(weight.dtype)


def _pull_back(fn: Any, leaves: list[Tensor], dy: Tensor, dtotal: Tensor) -> Variant:
    """The backward alone. Its forward runs once."""
    made = functools.cache(lambda: fn(*leaves))

    def run() -> tuple[Tensor, Tensor]:
        dx, _, dweight = torch.autograd.grad(made(), leaves, (dy, dtotal), retain_graph=True)
        return dx, dweight

    return Variant(run, _slices)


def _rows(pair: Any) -> list[Tensor]:
    return [x[:CHECKED] for x in pair]


def _slices(pair: Any) -> list[Tensor]:
    dx, dweight = pair
    return [dx[:CHECKED], dweight]


ROWS = [
    row
    for N in (4096, 8192)
    for row in (
        Row(10, "add and rms norm fwd", forward, NORMS[N], [of_copy(0.90), times("torch.compile", 1.0), times("liger", 1.0)]),
        Row(11, "add and rms norm bwd", backward, NORMS[N], [of_copy(0.80), times("liger", 1.5)]),
    )
]
