"""Mixtures of experts: router, permutation and back, grouped product, and a whole layer."""

import functools
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, at_most_ms, either, of_copy, tflops, times
from bench.kernels.rows._liger import NOT_INSTALLED, liger
from mpar.kernels import implementation
from tools.kernel_shapes import EXPERTS, GROUPED_MATMUL, PERMUTE, ROUTER

__all__ = ["ROWS"]

CHECKED = 256
SOFTMAX = {"score": "softmax", "normalise": True, "order": "pre", "groups": 1, "groups_kept": 1} | {"group_best": 2, "scale": 1.0}


def route(setting: Setting, *, T: int, E: int, k: int) -> Built:
    """The best k of E experts for every token, with weights that add up to 1."""
    logits = setting.normal(T, E, dtype=torch.float32)
    compiled = setting.compiled(_route)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _route(logits, k), _rows),
        "torch.compile": Variant(lambda: compiled(logits, k), _rows),
    }
    ours = Variant(lambda: implementation("topk_router", "triton")(logits, None, k=k, **SOFTMAX)[:2], _rows)
    return Built(ours, peers, lambda: _route(logits[:CHECKED].double(), k), 2 * logits.nbytes + 8 * T * k)


def permute(setting: Setting, *, T: int, k: int, D: int, E: int) -> Built:
    """Rows of tokens in the order of experts."""
    x = setting.normal(T, D)
    order, inverse, *_ = _order(setting, T, k, E)
    source = order.long() // k
    compiled = setting.compiled(torch.index_select)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: x.index_select(0, source), _rows_of_one),
        "torch.compile": Variant(lambda: compiled(x, 0, source), _rows_of_one),
    }
    ours = Variant(lambda: implementation("permute", "triton")(x, inverse), _rows_of_one)
    return Built(ours, peers, lambda: [x[source[:CHECKED]].double()], (1 + k) * x.nbytes + inverse.nbytes)


def unpermute(setting: Setting, *, T: int, k: int, D: int, E: int) -> Built:
    """The weighted sum of each token's rows."""
    rows, weights = setting.normal(T * k, D), setting.normal(T, k, dtype=torch.float32)
    inverse = _order(setting, T, k, E)[1]
    places = inverse.long()
    compiled = setting.compiled(_gather)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _gather(rows, places, weights), _rows_of_one),
        "torch.compile": Variant(lambda: compiled(rows, places, weights), _rows_of_one),
    }
    ours = Variant(lambda: implementation("unpermute", "triton")(rows, inverse, weights), _rows_of_one)
    small = rows[places[:CHECKED].flatten()].double(), weights[:CHECKED].double()
    slots = torch.arange(small[0].shape[0], device=rows.device).view(-1, k)
    moved = rows.nbytes + rows.nbytes // k + weights.nbytes + inverse.nbytes
    return Built(ours, peers, lambda: [_gather(small[0], slots, small[1])], moved)


def grouped(setting: Setting, *, R: int, E: int, D: int, F: int) -> Built:
    """Every group of rows times its expert's weights."""
    x, w = setting.normal(R, D), setting.normal(E, D, F, scale=D**-0.5)
    offsets = _order(setting, R, 1, E)[3]
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _loop(x, w, offsets), _last_rows),
        "grouped_mm": _torch_grouped(setting, x, w, offsets),
    }
    ours = Variant(lambda: implementation("grouped_matmul", "triton")(x, w, offsets), _last_rows)

    def reference() -> list[Tensor]:
        experts = torch.searchsorted(offsets, torch.arange(R, device=x.device, dtype=torch.int32), right=True)[-CHECKED:]
        y = torch.empty(experts.numel(), F, dtype=torch.float64, device=x.device)
        for expert in experts.unique().tolist():
            y[experts == expert] = x[-CHECKED:][experts == expert].double() @ w[expert].double()
        return [y]

    return Built(ours, peers, reference, x.nbytes + w.nbytes + 2 * R * F, 2 * R * D * F)


def layer(setting: Setting, *, T: int, E: int, k: int, D: int, F: int) -> Built:
    """Router, permutation, two products with SwiGLU between them, weighted sum: forward."""
    operands = _layer_operands(setting, T, E, D, F)
    peers: dict[str, Variant | str] = {
        "grouped_mm and eager": _on_gpu(setting, lambda: [_torch_layer(*operands, k, _grouped_mm())], _rows),
        "eager": Variant(lambda: [_torch_layer(*operands, k, _loop)], _rows),
        "liger": NOT_INSTALLED,
    }
    if (fused := liger("ops.fused_moe", "LigerFusedMoEFunction")) is not None:
        x, router, *weights = operands
        own = [w.transpose(1, 2).contiguous() for w in weights]
        peers["liger"] = Variant(lambda: [_liger_layer(fused, x, router, own, k)], _rows)
    ours = Variant(lambda: [_layer(*operands, k)[0]], _rows)
    moved = sum(x.nbytes for x in operands) + operands[0].nbytes
    small = (operands[0][:CHECKED], *operands[1:])
    return Built(ours, peers, lambda: [_wide_layer(*small, k)], moved, 6 * T * k * D * F)


def layer_with_gradients(setting: Setting, *, T: int, E: int, k: int, D: int, F: int) -> Built:
    """The layer forward and backward: gradients of x through the experts, and of the weights of the experts."""
    operands = _layer_operands(setting, T, E, D, F)
    dy = setting.normal(T, D)
    leaves = [x.clone().requires_grad_() for x in operands]

    def torch_step(product: Any) -> list[Tensor]:
        y = _torch_layer(*leaves, k, product, router_gradient=False)
        return [y.detach()[:CHECKED], *_pick(torch.autograd.grad(y, [leaves[0], leaves[2], leaves[3]], dy))]

    def ours() -> list[Tensor]:
        y, saved = _layer(*operands, k)
        return [y[:CHECKED], *_pick(_layer_backward(*operands, saved, dy))]

    def reference() -> list[Tensor]:
        x, router, up, down = operands
        wide = [x.double().requires_grad_() for x in (x[:CHECKED], up, down)]
        y = _wide_layer(wide[0], router, *wide[1:], k)
        dx = torch.autograd.grad(y, wide[0], dy[:CHECKED].double())[0]
        return [y.detach(), dx, *_weights_reference(operands, dy, k)]

    peers: dict[str, Variant | str] = {
        "grouped_mm and eager": _on_gpu(setting, lambda: torch_step(_grouped_mm())),
        "eager": Variant(lambda: torch_step(_loop)),
        "liger": NOT_INSTALLED,
    }
    if (fused := liger("ops.fused_moe", "LigerFusedMoEFunction")) is not None:
        own = [w.transpose(1, 2).contiguous().requires_grad_() for w in operands[2:]]

        def liger_step() -> list[Tensor]:
            y = _liger_layer(fused, leaves[0], operands[1], own, k)
            dx, *dweights = torch.autograd.grad(y, [leaves[0], *own], dy)
            return [y.detach()[:CHECKED], *_pick((dx, *(dw.transpose(1, 2) for dw in dweights)))]

        peers["liger"] = Variant(liger_step)
    moved = 3 * sum(x.nbytes for x in operands)
    return Built(Variant(ours), peers, reference, moved, 18 * T * k * D * F)


def _order(setting: Setting, T: int, k: int, E: int) -> Any:
    experts = setting.normal(T, E, dtype=torch.float32).topk(k, 1).indices.int()
    return implementation("expert_order")(experts, num_experts=E)


def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(1).topk(k, 1)
    return weights / weights.sum(1, keepdim=True), experts


def _gather(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (rows[places].to(weights.dtype) * weights[..., None]).sum(1).to(rows.dtype)


def _loop(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    ends = pairwise([0, *offsets.tolist()])
    return torch.cat([x[start:end] @ w[expert] for expert, (start, end) in enumerate(ends)])


def _grouped_mm() -> Any:
    fn = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return lambda x, w, offsets: fn(x, w, offs=offsets)


def _torch_grouped(setting: Setting, x: Tensor, w: Tensor, offsets: Tensor) -> Variant | str:
    return _on_gpu(setting, lambda: _grouped_mm()(x, w, offsets), _last_rows)


def _on_gpu(setting: Setting, run: Any, select: Any = None) -> Variant | str:
    return "needs a GPU" if setting.device.type == "cpu" else Variant(run, select)


def _layer_operands(setting: Setting, T: int, E: int, D: int, F: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    router = setting.normal(D, E, dtype=torch.float32, scale=D**-0.5)
    return setting.normal(T, D), router, setting.normal(E, D, 2 * F, scale=D**-0.5), setting.normal(E, F, D, scale=F**-0.5)


def _layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor, k: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    triton = functools.partial(implementation, name="triton")
    weights, experts, _ = triton("topk_router")(x.float() @ router, None, k=k, **SOFTMAX)
    _, inverse, _, offsets = triton("expert_order")(experts, num_experts=up.shape[0])
    rows = triton("permute")(x, inverse)
    both = triton("grouped_matmul")(rows, up, offsets)
    hidden = triton("swiglu")(*both.chunk(2, 1))
    out = triton("grouped_matmul")(hidden, down, offsets)
    y = triton("unpermute")(out, inverse, weights)
    return y, (weights, inverse, offsets, rows, both, hidden, out)


def _layer_backward(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, saved: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    triton = functools.partial(implementation, name="triton")
    weights, inverse, offsets, rows, both, hidden, out = saved
    drows, _ = triton("unpermute_bwd")(out, inverse, weights, dy)
    dhidden = triton("grouped_matmul")(drows, down.transpose(1, 2), offsets)
    ddown = triton("grouped_matmul_dw")(hidden, drows, offsets)
    dboth = torch.cat(triton("swiglu_bwd")(*both.chunk(2, 1), dhidden), 1)
    dx = triton("grouped_matmul")(dboth, up.transpose(1, 2), offsets)
    dup = triton("grouped_matmul_dw")(rows, dboth, offsets)
    return triton("unpermute")(dx, inverse, None), dup, ddown


def _torch_layer(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, k: int, product: Any, *, router_gradient: bool = True
) -> Tensor:
    weights, experts = _route((x if router_gradient else x.detach()).float() @ router, k)
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=up.shape[0])
    offsets = counts.cumsum(0).to(torch.int32)
    gate, value = product(x[order // k], up, offsets).chunk(2, 1)
    rows = product(F.silu(gate) * value, down, offsets)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device)).view(-1, k)
    return _gather(rows, places, weights if router_gradient else weights.detach())


def _liger_layer(fused: Any, x: Tensor, router: Tensor, weights: list[Tensor], k: int) -> Tensor:
    shares, experts = _route(x.detach().float() @ router, k)
    return fused.apply(x, *weights, experts.int(), shares)


def _wide_layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor, k: int) -> Tensor:
    """The layer in float64, expert by expert. Experts are chosen in float32, since two may score nearly the same."""
    weights, experts = _route(x.detach().float() @ router, k)
    parts = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in experts.unique().tolist():
        tokens, slots = (experts == expert).nonzero(as_tuple=True)
        gate, value = (x[tokens].double() @ up[expert].double()).chunk(2, 1)
        y = (F.silu(gate) * value) @ down[expert].double()
        parts = parts.index_add(0, tokens, y * weights[tokens, slots, None].double())
    return parts


def _weights_reference(operands: tuple[Tensor, ...], dy: Tensor, k: int) -> list[Tensor]:
    """Gradients of the first expert's weights, from all the tokens that it has."""
    x, router, up, down = operands
    weights, experts = _route(x.float() @ router, k)
    tokens, slots = (experts == 0).nonzero(as_tuple=True)
    first = [w[0].double().requires_grad_() for w in (up, down)]
    gate, value = (x[tokens].double() @ first[0]).chunk(2, 1)
    y = ((F.silu(gate) * value) @ first[1]) * weights[tokens, slots, None].double()
    return list(torch.autograd.grad(y, first, dy[tokens].double()))


def _pick(grads: Any) -> list[Tensor]:
    dx, dup, ddown = grads
    return [dx[:CHECKED], dup[0], ddown[0]]


def _rows(results: Any) -> list[Tensor]:
    return [x[:CHECKED] for x in results]


def _rows_of_one(y: Tensor) -> list[Tensor]:
    return [y[:CHECKED]]


def _last_rows(y: Tensor) -> list[Tensor]:
    return [y[-CHECKED:]]


ROWS = [
    Row(17, "router", route, ROUTER, [times("eager", 3.0), at_most_ms(0.02)], dtype="float32"),
    Row(18, "permute", permute, PERMUTE, [of_copy(0.80)]),
    Row(18, "unpermute", unpermute, PERMUTE, [of_copy(0.80)]),
    Row(19, "grouped product", grouped, GROUPED_MATMUL, [either(times("grouped_mm", 0.90), tflops(500))]),
    Row(20, "experts fwd", layer, EXPERTS, [times("liger", 1.2), times("grouped_mm and eager", 1.2)]),
    Row(20, "experts fwd+bwd", layer_with_gradients, EXPERTS, [times("liger", 1.2), times("grouped_mm and eager", 1.2)]),
]
