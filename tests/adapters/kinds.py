"""The adapters that are tried on meshes: on matrices, on those of experts, and beside quantised weights."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpar import adapters
from mpar.adapters import LoRA
from tests.meshes import Place
from tests.program.oracle import BASE, MOE, Problem
from tests.quantised.problem import SHAPE, QuantisedProblem

__all__ = ["ADAPTERS", "problem_of"]

LLAMA = {**BASE, "model_type": "llama", "tie_word_embeddings": False}
WIDER = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # quantised weights have blocks of 64
NO_SIDE_LOSS = {**MOE, "router_aux_loss_coef": 0.0}
FEW_EXPERTS = {**NO_SIDE_LOSS, **WIDER, "moe_intermediate_size": 128, "num_experts": 4}
ADAPTERS: Mapping[str, tuple[LoRA, str | None]] = {
    "lora": (LoRA(rank=4), None),
    "dropout": (LoRA(rank=4, dropout=0.3), None),
    "rslora, dora, dropout": (LoRA(rank=4, rslora=True, dora=True, dropout=0.3), None),
    "embeddings, one in full": (LoRA(rank=4, targets=("embed_tokens", "v_proj"), modules_to_save=("lm_head",)), None),
    "nf4": (LoRA(rank=2, init="random"), "nf4"),
    "nf4, dropout": (LoRA(rank=4, init="random", dropout=0.25), "nf4"),
    "int8, dora": (LoRA(rank=4, init="random", dora=True), "int8"),
}
"""By name the adapter, and how the weights beside it are quantised. Where experts are spread, each has its own A and B, unless
there is dropout or DoRA, which matrices of experts cannot have."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@functools.cache
def _made(name: str, of_experts: bool, num_layers: int, num_microbatches: int) -> Any:
    lora, quantised = ADAPTERS[name]
    if of_experts and (lora.dropout or lora.dora):
        lora = replace(lora, targets=ATTENTION)
    config = {**(NO_SIDE_LOSS if of_experts else LLAMA), "num_hidden_layers": num_layers}
    if quantised is None:
        return Problem(config, SHAPE, num_microbatches=num_microbatches, adapt=lambda model: adapters.add(model, lora))
    config = {**(FEW_EXPERTS if of_experts else {**LLAMA, **WIDER}), "num_hidden_layers": num_layers}
    return QuantisedProblem(config, quantised, lora, num_microbatches)


def problem_of(name: str, place: Place) -> Any:
    """The problem of an adapter for the model of a place, with what one rank gives for it."""
    return _made(name, place.expert_parallel > 1, place.num_layers, place.num_microbatches)
