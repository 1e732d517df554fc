"""The peers' Llama with experts spread over ranks, in plain torch and in DTensor.

`all_to_all` is expert parallelism as torchtitan does it: tokens are sorted by expert, counts and rows go through
`all_to_all_single` with splits, and each rank multiplies the rows of its own experts by `grouped_mm`. `all_gather` is DTensor,
eager: every rank gathers the tokens, takes the rows of its own experts, and a partial sum is scattered back.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from bench.parallel._experts_config import ExpertsConfig

__all__ = ["Experts", "build", "make_step"]


class Experts(nn.Module):
    """The experts of one block. At first a rank has all of them; `spread` keeps only its own."""

    def __init__(self, cfg: ExpertsConfig) -> None:
        super().__init__()
        self.cfg, self.mesh, self.dispatcher = cfg, None, ""
        self.router = nn.Linear(cfg.d, cfg.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(cfg.experts, cfg.d, cfg.ffn)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.d))

    def spread(self, mesh: DeviceMesh, dispatcher: str) -> None:
        """Keep this rank's experts."""
        self.mesh, self.dispatcher = mesh, dispatcher
        for name in ("gate", "up", "down"):
            own = getattr(self, name).detach().chunk(mesh.size())[mesh.get_local_rank()]
            setattr(self, name, nn.Parameter(own.clone()))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = torch.softmax(self.router(tokens), -1).topk(self.cfg.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        return (self._gathered if self.dispatcher == "all_gather" else self._exchanged)(tokens, weights, experts).view(x.shape)

    def _multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows that are sorted by expert through this rank's experts."""
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        return F.grouped_mm(hidden, self.down, offs=ends)

    def _exchanged(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        order = experts.flatten().argsort(stable=True)
        rows, counts = tokens[order // self.cfg.top_k], torch.bincount(experts.flatten(), minlength=self.cfg.experts)
        if self.mesh is None:
            made = self._multiply(rows, counts)
        else:
            group, num_ranks = self.mesh.get_group(), self.mesh.size()
            coming = torch.empty_like(counts)
            dist.all_to_all_single(coming, counts, group=group)
            coming = coming.view(num_ranks, -1)
            sent, received = counts.view(num_ranks, -1).sum(1).tolist(), coming.sum(1).tolist()
            rows = all_to_all_single_autograd(rows, received, sent, group)
            own = torch.arange(coming.shape[1]).repeat(num_ranks).repeat_interleave(coming.flatten())
            by_expert = own.argsort(stable=True)
            made = self._multiply(rows[by_expert], coming.sum(0))
            made = all_to_all_single_autograd(made[by_expert.argsort()], sent, received, group)
        slots = made[order.argsort()].view(*weights.shape, -1)
        return (slots * weights[..., None]).sum(1)

    def _gathered(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        assert self.mesh is not None

        def gather(x: Tensor) -> Tensor:
            whole = DTensor.from_local(x, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()])

        tokens, weights, experts = gather(tokens), gather(weights), gather(experts)
        num_own = self.gate.shape[0]
        slots = experts.flatten() - self.mesh.get_local_rank() * num_own
        slots = torch.where((slots >= 0) & (slots < num_own), slots, num_own)
        counts = torch.bincount(slots, minlength=num_own + 1)[:num_own]
        order = slots.argsort(stable=True)[: int(counts.sum())]
        places = order // self.cfg.top_k
        made = self._multiply(tokens[places], counts) * weights.flatten()[order, None]
        y = torch.zeros_like(tokens).index_add(0, places, made)
        return DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def build(workload: ModuleType, cfg: ExpertsConfig) -> nn.Module:
    """The whole model with its first weights."""
    model = workload.Llama(cfg)
    for block in model.layers.values():
        block.mlp = Experts(cfg)
    return workload.init_(model)


def make_step(workload: ModuleType, cfg: ExpertsConfig, dispatcher: str, ranks: int) -> Callable[[], Tensor]:
    """`step() -> loss` of this rank's rows. DDP reduces all gradients but those of experts, which saw the tokens of all ranks."""
    mesh, model = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), build(workload, cfg)
    for block in model.layers.values():
        block.mlp.spread(mesh, dispatcher)
    named = dict(model.named_parameters())
    spread = [name for name in named if name.endswith((".gate", ".up", ".down"))]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, spread)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    own, shared = [named[name] for name in spread], [p for name, p in named.items() if name not in spread]
    optimizer, data = workload.adamw(named.values()), workload.batches(cfg)

    def step() -> Tensor:
        tokens, labels = (x.chunk(ranks)[mesh.get_local_rank()] for x in next(data))
        loss = workload.cross_entropy(parallel(tokens), labels)
        loss.backward()
        torch._foreach_div_([p.grad for p in own], ranks)
        squares = nn.utils.get_total_norm([p.grad for p in own]).square()
        dist.all_reduce(squares)
        norm = (squares + nn.utils.get_total_norm([p.grad for p in shared]).square()).sqrt()
        nn.utils.clip_grads_with_norm_(named.values(), workload.CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
