"""The peers' Llama with its sequence spread over ranks, by torch.

`ring` and `all_gather` are torch's context parallelism (torch.distributed.tensor.experimental): its ring, its load balance, its
two ways of exchanging keys and values. torch 2.13 enters it only from attention ops of GPUs: its table of ops lacks that of the
CPU (`aten._scaled_dot_product_flash_attention_for_cpu`), so that `context_parallel(...)` fails here. The functions that the table
leads to are therefore called directly, with the CPU's op. `all_to_all` exchanges heads for positions by torch's functional
collective; `dtensor_all_gather` and `dtensor_all_to_all` are eager DTensor, as one writes them by hand (on CPU DTensor has no
all-to-all: it gathers, and keeps a part).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

__all__ = ["CONTIGUOUS", "METHODS", "make_step", "zigzag"]

METHODS = ("ring", "all_gather", "all_to_all", "dtensor_all_gather", "dtensor_all_to_all")
CONTIGUOUS = ("all_to_all", "dtensor_all_to_all")
ROTATE = {"ring": "alltoall", "all_gather": "allgather"}
aten = torch.ops.aten

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of this rank's positions; (B, N, S / ranks, H) each."""


def zigzag(length: int, ranks: int) -> Tensor:
    """The original index of each position, (ranks, length / ranks): rank r has parts r and 2 * ranks - 1 - r of 2 * ranks."""
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.stack([torch.cat([parts[r], parts[-1 - r]]) for r in range(ranks)])


class _Ring(torch.autograd.Function):
    """torch's ring around the CPU's attention op."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, rotate: str) -> Tensor:
        set_rotate_method(rotate)
        op = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = torch_ring._templated_ring_attention(mesh.get_group(), 2, op, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mesh, ctx.rotate = mesh, rotate
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        set_rotate_method(ctx.rotate)
        grads = torch_ring._templated_ring_attention_backward(
            ctx.mesh.get_group(),
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=dout,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return *grads[:3], None, None


def _attend(method: str, mesh: DeviceMesh, order: Tensor) -> Attend:
    """Attention over the whole sequence, of which rank r holds the positions `order[r]`."""
    if method in ROTATE:
        return lambda q, k, v: _Ring.apply(q, k, v, mesh, ROTATE[method])
    sees = order[mesh.get_local_rank()][:, None] >= order.flatten()

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = (DTensor.from_local(x, mesh, [Shard(2)]).redistribute(placements=[Replicate()]) for x in (k, v))
        k, v = (x.to_local(grad_placements=[Partial()]) for x in whole)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)

    def exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (DTensor.from_local(x, mesh, [Shard(2)]).redistribute(placements=[Shard(1)]).to_local() for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return DTensor.from_local(out, mesh, [Shard(1)]).redistribute(placements=[Shard(2)]).to_local()

    def carried(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_exchange(x, 1, 2, mesh) for x in (q, k, v))
        return _exchange(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1, mesh)

    return {"dtensor_all_gather": gathered, "dtensor_all_to_all": exchanged, "all_to_all": carried}[method]


def _exchange(x: Tensor, split: int, joined: int, mesh: DeviceMesh) -> Tensor:
    """An all-to-all: rank i gets part i of dim `split` from every rank, and joins these parts along dim `joined`."""
    parts = torch.stack(x.chunk(mesh.size(), split))
    return torch.cat(all_to_all_single_autograd(parts, None, None, mesh.get_group()).unbind(), joined)


def make_step(workload: ModuleType, cfg: Any, method: str, ranks: int) -> Callable[[], Tensor]:
    """`step() -> loss` of this rank's tokens. Parameters are replicated; DDP reduces their gradients over the ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    order = torch.arange(cfg.seq).view(ranks, -1) if method in CONTIGUOUS else zigzag(cfg.seq, ranks)
    own, attend = order[mesh.get_local_rank()], _attend(method, mesh, order)
    model = workload.init_(workload.Llama(cfg))
    model.cos, model.sin = model.cos[own], model.sin[own]
    for block in model.layers.values():
        block.self_attn.forward = _forward(block.self_attn, workload, attend)
    parallel = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False
    )  # ranks have different cos and sin
    optimizer, data = workload.adamw(model.parameters()), workload.batches(cfg)

    def step() -> Tensor:
        tokens, labels = (x[:, own] for x in next(data))
        loss = workload.cross_entropy(parallel(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _forward(layer: Any, workload: ModuleType, attend: Attend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The forward of the peers' attention layer, with `attend` as its attention."""

    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made = (p(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k, v = made
        out = attend(workload.rotate(q, cos, sin), workload.rotate(k, cos, sin), v)
        return layer.o_proj(out.transpose(1, 2).flatten(2))

    return forward
