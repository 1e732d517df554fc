"""Rotary embedding of queries and keys."""

import functools

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy, times
from bench.kernels.rows._liger import NOT_INSTALLED, liger
from mpar.kernels import implementation
from tools.kernel_shapes import ROPE_LONG

__all__ = ["ROWS"]

TOKENS_CHECKED = 256


def rotate(setting: Setting, *, S: int, N: int, K: int, H: int, backward: bool) -> Built:
    """The rotation of queries and of keys; with `backward` the rotation back, which is that of gradients."""
    q, k = setting.normal(1, S, N, H), setting.normal(1, S, K, H)
    angles = torch.arange(S, device=setting.device)[:, None] * 1e4 ** (-torch.arange(0, H, 2, device=setting.device) / H)
    cos, sin = angles.cos().float()[None], (-angles if backward else angles).sin().float()[None]
    compiled, fused = setting.compiled(_both), liger("ops.rope", "LigerRopeFunction")
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _both(q, k, cos, sin), _first),
        "torch.compile": Variant(lambda: compiled(q, k, cos, sin), _first),
        "liger": NOT_INSTALLED,
    }
    if fused is not None:  # it overwrites its operands, which are (B, heads, S, H)
        own = [x.clone().transpose(1, 2) for x in (q, k)]
        tables = [torch.cat([x, x], -1) for x in (cos, sin)]
        peers["liger"] = Variant(lambda: fused.apply(*own, *tables), lambda pair: _first([x.transpose(1, 2) for x in pair]))
    mine = [x.clone() for x in (q, k)]  # overwritten too: every call turns further, so only the first is compared
    ours = Variant(lambda: implementation("rope_many", "triton")(mine, cos, sin, interleaved=False), _first)
    small = [x[:, :TOKENS_CHECKED].double() for x in (q, k, cos, sin)]
    return Built(ours, peers, lambda: _first(_both(*small)), 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes)


def _both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [_turn(x, cos.unsqueeze(2), sin.unsqueeze(2)) for x in (q, k)]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _first(pair: list[Tensor]) -> list[Tensor]:
    return [x[:, :TOKENS_CHECKED] for x in pair]


BARS = [of_copy(0.85), times("liger", 1.0)]
ROWS = [
    Row(9, "rope fwd", functools.partial(rotate, backward=False), ROPE_LONG, BARS),
    Row(9, "rope bwd", functools.partial(rotate, backward=True), ROPE_LONG, BARS),
]
