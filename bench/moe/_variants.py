"""The variants: ways to compute forward and backward of one layer from the same weights, tokens and cotangent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from mpar import jit, ops
from mpar.mesh import Mesh
from mpar.models.layers.moe import Moe, MoeConfig, moe
from mpar.strategy import preset

__all__ = ["VARIANTS", "Case", "Data", "make"]

VARIANTS = ("mpar", "mpar_eager", "dense", "dense_wide", "transformers", "transformers_grouped", "products")
"""`mpar` is a compiled program of one rank, `mpar_eager` the same function under autograd."""

Pass = Callable[[], Mapping[str, Tensor]]
"""Computes one forward and backward; gives the results by name."""


@dataclass(frozen=True)
class Case:
    """Sizes: tokens, model dim, hidden dim of an expert, experts, and how many experts a token has."""

    tokens: int = 4096
    d: int = 512
    mlp: int = 1024
    experts: int = 8
    top_k: int = 2

    @property
    def flops(self) -> int:
        """FLOPs of the experts' products, forward and backward: three matrices, each in three products."""
        return 9 * 2 * self.tokens * self.top_k * self.d * self.mlp

    @property
    def moved_bytes(self) -> int:
        """Bytes that moving rows to experts and back must read and write, in float32, in forward and backward.

        To the experts tokens are read and rows written; back rows are read and tokens written. Gradients move as much, and rows
        are read once more for the gradients of the weights.
        """
        return 4 * self.d * (4 * self.tokens + 5 * self.tokens * self.top_k)


@dataclass(frozen=True)
class Data:
    """The tokens, the cotangent of the result, the weights as mpar has them."""

    x: Tensor
    dy: Tensor
    params: Moe

    @classmethod
    def draw(cls, case: Case) -> "Data":
        """Random data, always from the same seed."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        E, D, M = case.experts, case.d, case.mlp
        params = cast(Any, Moe)(
            router_DE=normal(D, E, scale=D**-0.5),
            gate_EDF=normal(E, D, M, scale=D**-0.5),
            up_EDF=normal(E, D, M, scale=D**-0.5),
            down_EFD=normal(E, M, D, scale=M**-0.5),
        )
        return cls(normal(1, case.tokens, D), normal(1, case.tokens, D), params)


def make(name: str, case: Case, data: Data) -> Pass:
    """The variant `name`."""
    makers: dict[str, Callable[[], Pass]] = {
        "mpar": lambda: _mpar_compiled(case, data),
        "mpar_eager": lambda: _mpar_eager(case, data),
        "dense": lambda: _dense(case, data, rows=case.tokens * case.top_k, mlp=case.mlp),
        "dense_wide": lambda: _dense(case, data, rows=case.tokens, mlp=case.mlp * case.top_k),
        "transformers": lambda: _transformers(case, data, "eager"),
        "transformers_grouped": lambda: _transformers(case, data, "grouped_mm"),
        "products": lambda: _products(case, data),
    }
    return makers[name]()


WEIGHTS = ("router_DE", "gate_EDF", "up_EDF", "down_EFD")


def _layer(case: Case) -> Callable[..., Tensor]:
    config = MoeConfig(num_experts=case.experts, top_k=case.top_k, mlp_size=case.mlp)
    return lambda params, x: moe(params, config, x, {}, training=False)[0]


def _mpar_compiled(case: Case, data: Data) -> Pass:
    layer = _layer(case)

    def both(params: Moe, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        y, pull = torch.func.vjp(layer, params, x)
        dparams, dx = pull(dy)
        return {"y": y, "dx": dx} | {f"d{name}": getattr(dparams, name) for name in WEIGHTS}

    mesh = Mesh(dp=1)
    compiled = jit(both, mesh=mesh, table=preset("ddp").compute)
    return lambda: compiled(data.params, data.x, data.dy)


def _mpar_eager(case: Case, data: Data) -> Pass:
    layer, x = _layer(case), data.x.clone().requires_grad_()
    leaves = {name: getattr(data.params, name).clone().requires_grad_() for name in WEIGHTS}
    params = cast(Any, Moe)(**leaves)

    def both() -> dict[str, Tensor]:
        y = layer(params, x)
        grads = torch.autograd.grad(y, [x, *leaves.values()], data.dy)
        return dict(zip(("y", "dx", *(f"d{name}" for name in WEIGHTS)), (y.detach(), *grads), strict=True))

    return both


def _dense(case: Case, data: Data, *, rows: int, mlp: int) -> Pass:
    """SwiGLU as it is commonly written; its matrices are those of the first experts."""
    wide = mlp // case.mlp
    gate, up = (
        w[:wide].transpose(0, 1).flatten(1).contiguous().requires_grad_() for w in (data.params.gate_EDF, data.params.up_EDF)
    )
    down = data.params.down_EFD[:wide].flatten(0, 1).contiguous().requires_grad_()
    repeats = rows // case.tokens
    x, dy = (t[0].repeat(repeats, 1) for t in (data.x, data.dy))
    x.requires_grad_()

    def both() -> dict[str, Tensor]:
        y = (F.silu(x @ gate) * (x @ up)) @ down
        return {"y": y.detach(), "dx": torch.autograd.grad(y, [x, gate, up, down], dy)[0]}

    return both


def _transformers(case: Case, data: Data, implementation: str) -> Pass:
    """Qwen3-MoE's block, in training as transformers runs it with `experts_implementation=implementation`."""
    config = Qwen3MoeConfig(
        hidden_size=case.d,
        moe_intermediate_size=case.mlp,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    block = cast(nn.Module, Qwen3MoeSparseMoeBlock(config)).train()
    gate_up = torch.cat([data.params.gate_EDF, data.params.up_EDF], 2).transpose(1, 2)
    weights = {"gate.weight": data.params.router_DE.T, "experts.gate_up_proj": gate_up}
    weights["experts.down_proj"] = data.params.down_EFD.transpose(1, 2)
    block.load_state_dict({name: weight.contiguous() for name, weight in weights.items()})
    x, leaves = data.x.clone().requires_grad_(), [dict(block.named_parameters())[name] for name in weights]

    def both() -> dict[str, Tensor]:
        y = block(x)
        dx, drouter, dgate_up, ddown = torch.autograd.grad(y, [x, *leaves], data.dy)
        dgate, dup = dgate_up.transpose(1, 2).chunk(2, 2)
        experts = {"dgate_EDF": dgate, "dup_EDF": dup, "ddown_EFD": ddown.transpose(1, 2)}
        return {"y": y.detach(), "dx": dx, "drouter_DE": drouter.T} | experts

    return both


def _products(case: Case, data: Data) -> Pass:
    """A floor: only the experts' nine products, on rows that are already sorted by expert, into memory that is allocated."""
    with torch.no_grad():
        logits = data.x[0] @ data.params.router_DE
        experts = ops.topk_router(logits, k=case.top_k)[1]
        counts = torch.bincount(experts.flatten().long(), minlength=case.experts).tolist()
    row, hidden = (torch.randn(case.tokens * case.top_k, size) for size in (case.d, case.mlp))
    row_out, hidden_out = torch.empty_like(row), torch.empty_like(hidden)
    grads = {name: torch.empty_like(getattr(data.params, name)) for name in WEIGHTS[1:]}

    def both() -> dict[str, Tensor]:
        start = 0
        for e, count in enumerate(counts):
            r, h, r_out, h_out = (t[start : start + count] for t in (row, hidden, row_out, hidden_out))
            for name in ("gate_EDF", "up_EDF"):
                w = getattr(data.params, name)[e]
                torch.mm(r, w, out=h_out)
                torch.mm(h, w.T, out=r_out)
                torch.mm(r.T, h, out=grads[name][e])
            w = data.params.down_EFD[e]
            torch.mm(h, w, out=r_out)
            torch.mm(r, w.T, out=h_out)
            torch.mm(h.T, r, out=grads["down_EFD"][e])
            start += count
        return {}

    return both
