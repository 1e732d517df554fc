"""Keys and names of stored weights that the configs and checkpoints of several models with experts have in common."""

from mpar.errors import ConfigError
from mpar.models.architectures.keys._key import Key, Values

__all__ = ["EXPERT_KEYS", "aux_loss", "expert_names", "num_experts", "sparse_layers"]

EXPERT_KEYS = {
    "num_experts": Key((int,), None, nullable=True, positive=True),
    "num_local_experts": Key((int,), None, nullable=True, positive=True),
    "router_aux_loss_coef": Key((int, float), 0.001),
    "output_router_logits": Key((bool,), False),
}
"""num_experts and num_local_experts are two names of the same number; transformers writes either."""


def num_experts(title: str, values: Values, default: int) -> int:
    """The number of experts. Raises ConfigError if its two keys disagree."""
    given = {name: values[name] for name in ("num_experts", "num_local_experts") if values[name] is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(f"cannot read {title}: {given} disagree.\nRemove one of the two keys.")
    return next(iter(given.values()), default)


def aux_loss(values: Values) -> float:
    """The coefficient of the load-balancing loss; transformers adds this loss only if output_router_logits is true."""
    return float(values["router_aux_loss_coef"]) if values["output_router_logits"] else 0.0


def sparse_layers(title: str, values: Values) -> tuple[bool, ...]:
    """For each layer whether it has experts: every decoder_sparse_step-th layer has, unless mlp_only_layers names it."""
    num_layers, period, dense = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or []
    wrong = [layer for layer in dense if not isinstance(layer, int) or not 0 <= layer < num_layers]
    if wrong:
        raise ConfigError(f"cannot read {title}: mlp_only_layers has {wrong}; there are layers 0 to {num_layers - 1}")
    return tuple(i not in dense and (i + 1) % period == 0 for i in range(num_layers))


def expert_names(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, tuple[str, str]]:
    """For each leaf of experts: the stored tensors, one for each expert, and the transform. `prefix` is the name of the mlp."""
    stored = f"{prefix}.experts.{{e}}"
    return {
        "layers.{i}.mlp.gate_EDF": (f"{stored}.{gate}.weight", "f d -> e d f"),
        "layers.{i}.mlp.up_EDF": (f"{stored}.{up}.weight", "f d -> e d f"),
        "layers.{i}.mlp.down_EFD": (f"{stored}.{down}.weight", "d f -> e f d"),
    }
