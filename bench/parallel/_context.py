"""Context: a dense model whose sequence is spread over ranks."""

from dataclasses import replace

from bench._workload import build_model, initial_params
from bench.parallel._context_torch import make_step
from bench.parallel._subject import OURS, Config, Plan, Sizes, Subject
from mpar.mesh import Mesh
from mpar.strategy import preset

__all__ = ["CONTEXT"]

PEERS = {
    "ring": ("torch:ring",),
    "all_gather": ("torch:all_gather", "torch:dtensor_all_gather"),
    "all_to_all": ("torch:all_to_all", "torch:dtensor_all_to_all"),
}
"""For each method of mpar the peers that it is compared with."""
PAIRS = {f"{ours}:{method}": peers for ours in OURS for method, peers in PEERS.items()}
SLICED = {f"mpar:{method}/{slices}": (f"mpar:{method}",) for method in PEERS for slices in (2, 4, 8)}
"""Variants with rows cut into slices, compared with the same method without: `ring/4` is the ring with 4 slices."""


def _sized(cfg: Config, sizes: Sizes) -> Config:
    """The config at these sizes, with as many key heads as query heads, since torch's ring has no groups of heads."""
    return replace(cfg, seq=sizes["seq"], batch=sizes["batch"], kv_heads=cfg.heads)


def _plan(name: str, ranks: int) -> Plan:
    method, _, slices = name.partition("/")
    return Plan(Mesh(cp=ranks), replace(preset("ddp"), context_parallel=method), int(slices or 1))


CONTEXT = Subject(
    name="context",
    help="steps whose sequence is spread over ranks, beside torch's context parallelism and DTensor, in the same processes",
    sizes={"seq": 2048, "batch": 1},
    variants=(*PAIRS, *(peer for peers in PEERS.values() for peer in peers)),
    pairs=PAIRS | SLICED,
    config=_sized,
    label=lambda config, sizes: f"{config}, {sizes['batch']} x {sizes['seq']}",
    model=lambda workload, cfg: build_model(cfg, workload),
    params=lambda workload, cfg: initial_params(cfg, workload),
    plan=_plan,
    torch_step=lambda workload, cfg, variant, ranks: make_step(workload, cfg, variant.partition(":")[2], ranks),
)
