"""Mixture of experts: its config and parameters, the router, the side losses, and three ways to compute the experts."""

from mpar.models.layers.moe._config import ROUTER_OPTIONS, MoeConfig, with_router_options
from mpar.models.layers.moe._moe import moe
from mpar.models.layers.moe._params import MOE_AXES, Moe, moe_shapes
from mpar.models.layers.moe._router import router_logits, updated_choice_bias

__all__ = [
    "MOE_AXES",
    "ROUTER_OPTIONS",
    "Moe",
    "MoeConfig",
    "moe",
    "moe_shapes",
    "router_logits",
    "updated_choice_bias",
    "with_router_options",
]
