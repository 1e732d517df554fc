"""Causal depthwise convolution along the sequence: each channel is a weighted sum of the last W values of the same channel."""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["causal_conv1d", "causal_conv1d_p"]

FAR = 1 << 40
causal_conv1d_p = Primitive("causal_conv1d", "x, weight, bias?, state?, documents? -> y")


def causal_conv1d(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    state_BTC: Tensor | None = None,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """`y[s] = bias + sum over w of weight[w] * x[s - (W - 1) + w]`, for each channel; C may be any number of dims.

    The T = W - 1 values before the first token are those of `state_BTC`, or zeros. A token does not see values from before the
    last change of `documents_BS`; `state_BTC` belongs to the document of the first token. Sums are float32 or wider; the result
    has the dtype of `x_BSC`. Documents have no gradient. Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return causal_conv1d_p.bind(x_BSC, weight_CW, bias_C, state_BTC, documents_BS)


@causal_conv1d_p.def_abstract
def _abstract(x, weight, bias, state, documents):
    given = {"x": x, "weight": weight, "bias": bias, "state": state, "documents": documents}
    given = {name: operand for name, operand in given.items() if operand is not None}
    shapes = "causal_conv1d of " + ", ".join(f"{name} {tuple(operand.shape)}" for name, operand in given.items())
    if x.ndim < 2 or weight.ndim != x.ndim - 1 or weight.shape[:-1] != x.shape[2:] or not weight.shape[-1]:
        raise ShapeError(f"{shapes}: x must be (B, S, C) and weight (C, W), with W > 0 and any number of dims in place of C")
    rows, channels = tuple(x.shape[:2]), tuple(x.shape[2:])
    expected = {"bias": channels, "state": (rows[0], weight.shape[-1] - 1, *channels), "documents": rows}
    problems = [f"{name} must be {s}" for name, s in expected.items() if name in given and tuple(given[name].shape) != s]
    if problems:
        raise ShapeError(f"{shapes}:\n" + "\n".join(problems))
    wrong = {name: operand.dtype for name, operand in given.items() if name != "documents" and not operand.is_floating_point()}
    if wrong:
        raise DtypeError(f"{shapes}: these must be floating: {wrong}")
    if documents is not None and documents.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{shapes}: documents must be int32 or int64, not {documents.dtype}")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _wide(*operands: Tensor | None) -> torch.dtype:
    wide = torch.float32
    for operand in operands:
        wide = wide if operand is None else torch.promote_types(wide, operand.dtype)
    return wide


def _since_change(documents: Tensor, ndim: int) -> Tensor:
    """How many tokens of the same document come right before each token; at least FAR for tokens of the first document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    changed = torch.zeros_like(documents, dtype=torch.bool)
    changed[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(changed, places, torch.full_like(places, -FAR)).cummax(1).values
    return (places - starts).view(*documents.shape, *[1] * (ndim - 2))


def _before(x: Tensor, state: Tensor | None, count: int) -> Tensor:
    """`x` preceded by `count` values: those of `state`, or zeros."""
    before_first = x.new_zeros((x.shape[0], count, *x.shape[2:])) if state is None else state.to(x.dtype)
    return torch.cat([before_first, x], 1)


@causal_conv1d_p.def_impl
def _impl(x, weight, bias, state, documents):
    wide, size, width = _wide(x, weight, bias, state), x.shape[1], weight.shape[-1]
    padded, weight = _before(x.to(wide), state, width - 1), weight.to(wide)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    if bias is not None:
        y += bias.to(wide)
    since = None if documents is None else _since_change(documents, x.ndim)
    for w in range(width):
        seen = padded[:, w : w + size]
        y.addcmul_(seen if since is None else seen * (since >= width - 1 - w), weight[..., w])
    return y.to(x.dtype)


@causal_conv1d_p.def_vjp("x, weight, bias, state, documents, dy -> dx, dweight, dbias, dstate")
def _vjp(x, weight, bias, state, documents, dy):
    wide, size, width = _wide(x, weight, bias, state, dy), x.shape[1], weight.shape[-1]
    padded, gain, dy = _before(x.to(wide), state, width - 1), weight.to(wide), dy.to(wide)
    dpadded = torch.zeros_like(padded)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    since = None if documents is None else _since_change(documents, x.ndim)
    for w in range(width):
        part = dy if since is None else dy * (since >= width - 1 - w)
        dpadded[:, w : w + size].addcmul_(part, gain[..., w])
        dweight[..., w] = (part * padded[:, w : w + size]).sum((0, 1))
    dx, dstate = dpadded[:, width - 1 :], dpadded[:, : width - 1]
    dbias = x.new_empty(0) if bias is None else dy.sum((0, 1)).to(bias.dtype)
    dstate = x.new_empty(0) if state is None else dstate.to(state.dtype).clone(memory_format=torch.contiguous_format)
    return dx.to(x.dtype).clone(memory_format=torch.contiguous_format), dweight, dbias, dstate


causal_conv1d_p.def_formula(_impl)
# the sequence (s) and the state before it (t) are not sharded, because a token sees the tokens before it
causal_conv1d_p.def_sharding("b s ..., ... w, ..., b t ..., b s -> b s ...", need_replication="s t w")
causal_conv1d_p.bwd.def_sharding(
    "b s ..., ... w, ..., b t ..., b s, b s ... -> b s ..., ... w, ..., b t ...", need_replication="s t w"
)
causal_conv1d_p.def_batching_folded()
causal_conv1d_p.bwd.def_batching_loop()  # the gradients of weight and bias sum over dim 0


@causal_conv1d_p.def_cost
def _cost(x, weight, bias, state, documents):
    size = x.numel() * _wide(x, weight, bias, state).itemsize
    return Cost(flops=2 * weight.shape[-1] * x.numel(), bytes=2 * x.nbytes + weight.nbytes, workspace=3 * size)


@causal_conv1d_p.bwd.def_cost
def _cost_bwd(x, weight, bias, state, documents, dy):
    size = x.numel() * _wide(x, weight, bias, state, dy).itemsize
    return Cost(flops=4 * weight.shape[-1] * x.numel(), bytes=3 * x.nbytes + 2 * weight.nbytes, workspace=5 * size)
