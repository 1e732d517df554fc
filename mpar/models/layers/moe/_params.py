"""The parameters of a layer of experts: what they are, their logical axes, their shapes."""

from typing import Generic

from mpar.chain import Axes
from mpar.models.layers._feed_forward import FEED_FORWARD_AXES, FeedForward, mlp_shapes
from mpar.models.layers._sizes import Sizes
from mpar.models.layers.moe._config import MoeConfig
from mpar.tree import Leaf, struct

__all__ = ["MOE_AXES", "Moe", "moe_shapes"]


@struct
class Moe(Generic[Leaf]):
    """The router's matrix, the experts' matrices, the shared layer. Leaves that the config does not ask for are None."""

    router_DE: Leaf
    gate_EDF: Leaf
    up_EDF: Leaf
    down_EFD: Leaf
    router_bias_E: Leaf | None = None
    choice_bias_E: Leaf | None = None
    gate_bias_EF: Leaf | None = None
    up_bias_EF: Leaf | None = None
    down_bias_ED: Leaf | None = None
    shared: FeedForward[Leaf] | None = None
    shared_gate_D1: Leaf | None = None


MOE_AXES: Moe[Axes] = Moe(
    router_DE=("embed", None),
    gate_EDF=("expert", "embed", "expert_mlp"),
    up_EDF=("expert", "embed", "expert_mlp"),
    down_EFD=("expert", "expert_mlp", "embed"),
    router_bias_E=(None,),
    choice_bias_E=(None,),
    gate_bias_EF=("expert", "expert_mlp"),
    up_bias_EF=("expert", "expert_mlp"),
    down_bias_ED=("expert", "embed"),
    shared=FEED_FORWARD_AXES,
    shared_gate_D1=("embed", None),
)


def moe_shapes(config: MoeConfig, hidden_size: int) -> Moe[Sizes]:
    """The parameters with a tuple of sizes for each leaf."""
    E, D, F = config.num_experts, hidden_size, config.mlp_size
    return Moe(
        router_DE=(D, E),
        gate_EDF=(E, D, F),
        up_EDF=(E, D, F),
        down_EFD=(E, F, D),
        router_bias_E=(E,) if config.router_bias else None,
        choice_bias_E=(E,) if config.choice_bias else None,
        gate_bias_EF=(E, F) if config.mlp_bias else None,
        up_bias_EF=(E, F) if config.mlp_bias else None,
        down_bias_ED=(E, D) if config.mlp_bias else None,
        shared=None if config.shared is None else mlp_shapes(config.shared, D),
        shared_gate_D1=(D, 1) if config.shared_gate else None,
    )
