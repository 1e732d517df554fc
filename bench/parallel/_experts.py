"""Experts: a model with experts in place of each feed-forward layer; the experts are spread over ranks."""

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from bench.parallel._experts_config import ExpertsConfig, with_experts
from bench.parallel._experts_torch import build, make_step
from bench.parallel._subject import OURS, Plan, Subject
from mpar import models
from mpar.mesh import Mesh
from mpar.strategy import preset

__all__ = ["EXPERTS"]

DISPATCHERS = ("all_to_all", "all_gather")
PEERS = ("torch:all_to_all", "dtensor:all_gather")
PAIRS = {f"{ours}:{dispatcher}": PEERS for ours in OURS for dispatcher in DISPATCHERS}


def _model(workload: ModuleType, cfg: ExpertsConfig) -> models.Model:
    return models.from_config(cfg.hf_config(workload.NORM_EPS, workload.ROPE_THETA))


def _plan(dispatcher: str, ranks: int) -> Plan:
    return Plan(Mesh(dp=ranks), replace(preset("ddp"), expert_parallel=ranks, dispatcher=dispatcher))


def _initial_params(workload: ModuleType, cfg: ExpertsConfig) -> dict[str, Tensor]:
    """The peer's initial weights, by mpar's paths."""
    theirs = {name: p.detach() for name, p in build(workload, cfg).named_parameters()}
    heads = (-1, cfg.head_dim)
    ours = {"embed.table_VD": theirs["embed_tokens.weight"], "head.norm_D": theirs["norm.weight"]}
    ours["head.head_DV"] = theirs["lm_head.weight"].T
    for i in range(cfg.layers):
        layer = f"layers.{i}"
        for name, dims in (("q", "DNH"), ("k", "DKH"), ("v", "DKH")):
            ours[f"{layer}.attention.{name}_{dims}"] = theirs[f"{layer}.self_attn.{name}_proj.weight"].T.unflatten(1, heads)
        ours[f"{layer}.attention.o_NHD"] = theirs[f"{layer}.self_attn.o_proj.weight"].T.unflatten(0, heads)
        ours[f"{layer}.attn_norm_D"] = theirs[f"{layer}.input_layernorm.weight"]
        ours[f"{layer}.mlp_norm_D"] = theirs[f"{layer}.post_attention_layernorm.weight"]
        ours[f"{layer}.mlp.router_DE"] = theirs[f"{layer}.mlp.router.weight"].T
        for name, dims in (("gate", "EDF"), ("up", "EDF"), ("down", "EFD")):
            ours[f"{layer}.mlp.{name}_{dims}"] = theirs[f"{layer}.mlp.{name}"]
    return {path: value.contiguous() for path, value in ours.items()}


EXPERTS = Subject(
    name="experts",
    help="steps whose experts are spread over ranks, beside plain torch and DTensor, in the same processes",
    sizes={"experts": 8, "top_k": 2},
    variants=(*PAIRS, *PEERS),
    pairs=PAIRS,
    config=lambda cfg, sizes: with_experts(cfg, sizes["experts"], sizes["top_k"]),
    label=lambda config, sizes: f"{config}, {sizes['experts']} experts, top {sizes['top_k']}",
    model=_model,
    params=_initial_params,
    plan=_plan,
    torch_step=lambda workload, cfg, variant, ranks: make_step(workload, cfg, variant.partition(":")[2], ranks),
)
