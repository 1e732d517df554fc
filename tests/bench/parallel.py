"""One rank: what torch's programs of the benchmarks compute on several ranks, beside the same on whole tensors."""

import itertools
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from bench.parallel import _context_torch as context
from bench.parallel._experts_config import ExpertsConfig
from bench.parallel._experts_torch import Experts


def attention(method: str, ranks: int) -> float:
    """The largest difference of this rank's part of the output and of the gradients."""
    mesh = init_device_mesh("cpu", (ranks,))
    order = torch.arange(16).view(ranks, -1) if method in context.CONTIGUOUS else context.zigzag(16, ranks)
    own = order[dist.get_rank()]
    q, k, v, dout = torch.randn(4, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = (y, *torch.autograd.grad(y, whole, dout))
    parts = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
    out = context._attend(method, mesh, order)(*parts)
    actual = (out, *torch.autograd.grad(out, parts, dout[:, :, own]))
    return max(float((a - b[:, :, own]).detach().abs().max()) for a, b in zip(actual, expected, strict=True))


def experts(dispatcher: str, ranks: int) -> float:
    """The same for a layer of experts; its weights' gradients too, of those that are here."""
    cfg = ExpertsConfig(d=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=1, seq=12, batch=4, experts=6, top_k=2)
    torch.manual_seed(0)
    layer, spread = Experts(cfg), Experts(cfg)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    spread.load_state_dict(layer.state_dict())
    spread.spread(init_device_mesh("cpu", (ranks,)), dispatcher)
    x, dy = torch.randn(2, 4, 12, 8)
    rank, found = dist.get_rank(), []
    for module, take in ((layer, slice(None)), (spread, slice(rank * 4 // ranks, (rank + 1) * 4 // ranks))):
        part = x[take].clone().requires_grad_()
        y = module(part)
        found.append((y, *torch.autograd.grad(y, [part, module.gate, module.up, module.down], dy[take])))
    rows, own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks), slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)
    pairs = zip(found[1], found[0], (rows, rows, own, own, own), strict=True)
    return max(float((a - b[part]).detach().abs().max()) for a, b, part in pairs)


def main() -> None:
    """Rank 0 says for each program how far off it is."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    programs = itertools.chain(
        ((f"context {method}", attention, method) for method in context.METHODS),
        ((f"experts {name}", experts, name) for name in ("all_to_all", "all_gather")),
    )
    for name, run, method in programs:
        error = torch.tensor(run(method, ranks))
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{name}: {float(error)}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
