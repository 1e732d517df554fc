"""A feed-forward layer that computes some tokens at a time, a tile: hidden features exist for the tokens of one tile only.

ALST, Bekman et al. 2025, arXiv:2506.13996. The backward computes the hidden features of every tile again.
"""

from math import ceil
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._geglu import geglu_p
from mpar.ops._product import add_product, product_into
from mpar.ops._swiglu import swiglu_p
from mpar.ops.primitive import Cost, Primitive

__all__ = ["Activation", "mlp_tiled"]

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
_APPROXIMATE = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}

mlp_tiled_p = Primitive("mlp_tiled", "x, gate?, up, down -> y", activation="str", chunk="int")


def mlp_tiled(
    x: Tensor,
    gate_DF: Tensor | None,
    up_DF: Tensor,
    down_FD: Tensor,
    *,
    activation: Activation = "silu",
    chunk: int = 1024,
) -> Tensor:
    """`(act(x @ gate_DF) * (x @ up_DF)) @ down_FD`, `chunk` tokens of `x` (..., D) at a time.

    Without a gate it is `act(x @ up_DF) @ down_FD`. `activation` is silu, gelu (by the error function) or gelu_pytorch_tanh.
    Only the operands are kept for the backward, which computes the hidden values again, a tile at a time, and sums the gradients
    of the weights in float32 or wider. The result has the shape and dtype of `x`.
    Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    return mlp_tiled_p.bind(x, gate_DF, up_DF, down_FD, activation=activation, chunk=chunk)


@mlp_tiled_p.def_abstract
def _abstract(x, gate, up, down, *, activation, chunk):
    given = {"x": x, "gate": gate, "up": up, "down": down}
    given = {name: operand for name, operand in given.items() if operand is not None}
    shapes = "mlp_tiled: " + ", ".join(f"{name} {tuple(operand.shape)}" for name, operand in given.items())
    fits = x.ndim >= 1 and up.ndim == down.ndim == 2 and up.shape == (x.shape[-1], down.shape[0]) and down.shape[1] == x.shape[-1]
    if not fits or (gate is not None and gate.shape != up.shape):
        raise ShapeError(f"{shapes}; they must be (..., D), gate and up (D, F), down (F, D)")
    dtypes = {name: operand.dtype for name, operand in given.items()}
    if len(set(dtypes.values())) > 1 or not x.is_floating_point():
        raise DtypeError(f"{shapes}: dtypes are {dtypes}; all must have the same floating dtype")
    if activation not in get_args(Activation):
        raise ConfigError(f"mlp_tiled: activation is {activation!r}; there are {', '.join(get_args(Activation))}")
    if chunk < 1:
        raise ConfigError(f"mlp_tiled: chunk is {chunk} tokens, must be positive")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Tiles:
    """The tokens of `x`, cut into tiles, and buffers for the hidden values of one tile, which all tiles reuse."""

    def __init__(self, x: Tensor, num_hidden: int, chunk: int, num_buffers: int) -> None:
        self.x_TD = x.reshape(-1, x.shape[-1])
        num_tokens = self.x_TD.shape[0]
        self.places = [slice(first, min(first + chunk, num_tokens)) for first in range(0, num_tokens, chunk)]
        self.buffers = [x.new_empty(min(chunk, num_tokens), num_hidden) for _ in range(num_buffers)]

    def product(self, buffer: int, tokens: slice, a_TD: Tensor, w_DF: Tensor) -> Tensor:
        """`a_TD[tokens] @ w_DF`, written into the buffer of that number."""
        return product_into(self.buffers[buffer][: tokens.stop - tokens.start], a_TD[tokens], w_DF)


def _hidden(gate_TF: Tensor | None, up_TF: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(up_TF) if gate_TF is None else swiglu_p.op(gate_TF, up_TF)
    approximate = _APPROXIMATE[activation]
    return F.gelu(up_TF, approximate=approximate) if gate_TF is None else geglu_p.op(gate_TF, up_TF, approximate=approximate)


def _hidden_bwd(gate_TF: Tensor | None, up_TF: Tensor, dhidden_TF: Tensor, activation: str) -> tuple[Tensor | None, Tensor]:
    """`(dgate, dup)` of a tile."""
    if activation == "silu":
        if gate_TF is None:
            return None, torch.ops.aten.silu_backward(dhidden_TF, up_TF)
        return swiglu_p.bwd.op(gate_TF, up_TF, dhidden_TF)
    approximate = _APPROXIMATE[activation]
    if gate_TF is None:
        return None, torch.ops.aten.gelu_backward(dhidden_TF, up_TF, approximate=approximate)
    return geglu_p.bwd.op(gate_TF, up_TF, dhidden_TF, approximate=approximate)


@mlp_tiled_p.def_impl
def _impl(x, gate, up, down, *, activation, chunk):
    tiles = _Tiles(x, up.shape[1], chunk, 1 if gate is None else 2)
    y_TD = torch.empty(tiles.x_TD.shape, dtype=x.dtype, device=x.device)
    for tokens in tiles.places:
        up_TF = tiles.product(0, tokens, tiles.x_TD, up)
        gate_TF = None if gate is None else tiles.product(1, tokens, tiles.x_TD, gate)
        product_into(y_TD[tokens], _hidden(gate_TF, up_TF, activation), down)
    return y_TD.view(x.shape)


@mlp_tiled_p.def_vjp("x, gate, up, down, dy -> dx, dgate, dup, ddown")
def _vjp(x, gate, up, down, dy, *, activation, chunk):
    """Gradients of the weights are summed over the tiles."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = tuple(None if w is None else torch.zeros(w.shape, dtype=wide, device=x.device) for w in (gate, up, down))
    dx = _pull_back(x, gate, up, down, dy, activation, chunk, sums)
    return dx, *(x.new_empty(0) if grad is None else grad.to(x.dtype) for grad in sums)


@mlp_tiled_p.def_vjp_part("x, gate, up, down, dy -> dx")
def mlp_tiled_x_bwd_p(x, gate, up, down, dy, *, activation, chunk):
    """The gradient of x alone, for weights that are frozen."""
    return _pull_back(x, gate, up, down, dy, activation, chunk, None)


def _pull_back(x, gate, up, down, dy, activation, chunk, sums: tuple[Tensor | None, ...] | None) -> Tensor:
    """dx: for each tile dhidden = dy down' and dx = dgate gate' + dup up'. Gradients of the weights are added to `sums`."""
    tiles = _Tiles(x, up.shape[1], chunk, 2 if gate is None else 3)
    dx_TD = torch.empty(tiles.x_TD.shape, dtype=x.dtype, device=x.device)
    dy_TD = dy.reshape(dx_TD.shape)
    dgate, dup, ddown = (None, None, None) if sums is None else sums
    for tokens in tiles.places:
        x_tile, dy_tile = tiles.x_TD[tokens], dy_TD[tokens]
        up_TF = tiles.product(0, tokens, tiles.x_TD, up)
        gate_TF = None if gate is None else tiles.product(2, tokens, tiles.x_TD, gate)
        if ddown is not None:
            _accumulate(ddown, _hidden(gate_TF, up_TF, activation), dy_tile)
        dhidden_TF = tiles.product(1, tokens, dy_TD, down.T)
        dgate_TF, dup_TF = _hidden_bwd(gate_TF, up_TF, dhidden_TF, activation)
        product_into(dx_TD[tokens], dup_TF, up.T)
        if dgate_TF is not None:
            dx_TD[tokens].addmm_(dgate_TF, gate.T)
        _accumulate(dup, x_tile, dup_TF)
        _accumulate(dgate, x_tile, dgate_TF)
    return dx_TD.view(x.shape)


def _accumulate(total: Tensor | None, a: Tensor, b: Tensor | None) -> None:
    """Add `a.T @ b` to `total`, which is float32 or wider, if there is one."""
    if total is None or b is None:
        return
    if total.dtype == a.dtype:
        add_product(total, a.T, b)
    else:
        total += a.T @ b


@mlp_tiled_p.def_formula
def _formula(x, gate, up, down, *, activation, chunk):
    acted = x @ (up if gate is None else gate)
    hidden = F.silu(acted) if activation == "silu" else F.gelu(acted, approximate=_APPROXIMATE[activation])
    return (hidden if gate is None else hidden * (x @ up)) @ down


mlp_tiled_p.def_sharding("... d, d f, d f, f d -> ... d", need_replication="d")
mlp_tiled_p.bwd.def_sharding("... d, d f, d f, f d, ... d -> ... d, d f, d f, f d", need_replication="d", linear="dy")
mlp_tiled_p.def_batching_leading()
mlp_tiled_p.bwd.def_batching_leading()
mlp_tiled_x_bwd_p.def_sharding("... d, d f, d f, f d, ... d -> ... d", need_replication="d", linear="dy")
mlp_tiled_x_bwd_p.def_batching_leading()


def _matrices(gate: Tensor | None) -> int:
    return 2 if gate is None else 3


def _tile_bytes(x: Tensor, up: Tensor, chunk: int) -> int:
    return min(chunk, x.shape[:-1].numel()) * up.shape[1] * x.element_size()


@mlp_tiled_p.def_cost
def _cost(x, gate, up, down, *, activation, chunk):
    flops = 2 * _matrices(gate) * x.numel() * up.shape[1]
    workspace = _matrices(gate) * _tile_bytes(x, up, chunk) + x.nbytes
    moved = 2 * x.nbytes + _matrices(gate) * up.nbytes
    return Cost(flops=flops, bytes=moved, workspace=workspace, matmul=_tile_shape(x, up, chunk, _matrices(gate)))


@mlp_tiled_p.bwd.def_cost
def _cost_bwd(x, gate, up, down, dy, *, activation, chunk):
    """The hidden values again, then twice the forward. With narrow dtypes the workspace has float32 sums and one product."""
    num = _matrices(gate)
    flops = 2 * (3 * num - 1) * x.numel() * up.shape[1]
    sums = up.numel() * (4 * num + x.element_size()) if x.element_size() < 4 else 0
    workspace = (2 * num + 2) * _tile_bytes(x, up, chunk) + 2 * x.nbytes + sums
    shape = _tile_shape(x, up, chunk, 3 * num - 1)
    return Cost(flops=flops, bytes=3 * x.nbytes + 2 * num * up.nbytes, workspace=workspace, matmul=shape)


@mlp_tiled_x_bwd_p.def_cost
def _cost_x_bwd(x, gate, up, down, dy, *, activation, chunk):
    """The hidden values again, then once the forward."""
    num = _matrices(gate)
    workspace = (2 * num + 2) * _tile_bytes(x, up, chunk) + 2 * x.nbytes
    shape = _tile_shape(x, up, chunk, 2 * num - 1)
    flops = 2 * (2 * num - 1) * x.numel() * up.shape[1]
    return Cost(flops=flops, bytes=3 * x.nbytes + num * up.nbytes, workspace=workspace, matmul=shape)


def _tile_shape(x: Tensor, up: Tensor, chunk: int, products: int) -> MatmulShape:
    rows = x.shape[:-1].numel()
    return MatmulShape(batch=products * ceil(rows / chunk), m=min(chunk, rows), n=up.shape[1], k=up.shape[0])

mlp_tiled_p.opaque = mlp_tiled_p.bwd.opaque = True  # so that only a chunk of hidden features is in memory
