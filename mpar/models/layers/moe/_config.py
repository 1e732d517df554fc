"""What a layer of experts is made of: sizes, router, capacity, side losses; and what cannot be."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mpar.errors import ConfigError, UnknownNameError
from mpar.models.layers._feed_forward import ACTIVATIONS, MlpConfig
from mpar.ops import RouterOrder as Order
from mpar.ops import RouterScore as Score

__all__ = ["ROUTER_OPTIONS", "MoeConfig", "with_router_options"]

RouterKind = Literal["topk", "sinkhorn", "balanced"]
SIDE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
ROUTER_OPTIONS = ("kind", "grouped", "capacity_factor", "token_groups", "padded", "bias_rate", *SIDE_LOSSES)
"""What training chooses and no checkpoint tells: the fields that `with_router_options` sets."""


@dataclass(frozen=True)
class MoeConfig:
    """Everything that the mathematics of the layer depends on.

    score, order, normalise, groups, groups_kept, group_best, scale: see `ops.topk_router`.
    mlp_size:        of each expert; `activation` is a key of ACTIVATIONS. mlp_bias: experts have biases.
    clamp:           None, or the limit L of gate * sigmoid(clamp_alpha * gate) * (up + 1), with gate <= L and -L <= up <= L.
    shared:          the layer that sees every token (None: there is none); shared_gate: times sigmoid(x @ w).
    router_bias:     the logits have a bias. choice_bias: the choice has one that the weights do not have; it gets no gradient
                     but moves by `bias_rate` after each step.
    kind:            "topk"; "sinkhorn": the choice is made from logits that are balanced over the microbatch; "balanced": slot
                     i = token * top_k + k goes to expert i mod num_experts, for benchmarks.
    capacity_factor: None, or an expert takes ceil(factor * tokens * top_k / num_experts) slots of a microbatch, by weight.
                     This and both kinds look at all tokens of a batch: they are for batches with labels. In generation, where a
                     token must not depend on others, all routers are "topk" and nothing is dropped.
    token_groups:    (g, h) divides a microbatch into g parts of its sequences times h parts of their positions, as they are
                     stored. Capacities are then a group's, "sinkhorn" balances within each, and aux_loss is the mean of theirs.
    padded:          an expert takes as many rows as its capacity says, zeros where there are fewer tokens: no shape depends on
                     data, and no number is asked of the device. The result is the same.
    aux_loss ...:    coefficients of the side losses, 0 for none.
    grouped:         False computes one expert after the other on all tokens: a reference.
    Raises ConfigError with everything that does not fit.
    """

    num_experts: int
    top_k: int
    mlp_size: int
    activation: str = "silu"
    mlp_bias: bool = False
    clamp: float | None = None
    clamp_alpha: float = 1.702
    score: Score = "softmax"
    order: Order = "pre"
    normalise: bool = True
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 2
    scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    shared: MlpConfig | None = None
    shared_gate: bool = False
    kind: RouterKind = "topk"
    grouped: bool = True
    capacity_factor: float | None = None
    token_groups: tuple[int, int] = (1, 1)
    padded: bool = False
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.token_groups, list):  # as files write it
            object.__setattr__(self, "token_groups", tuple(self.token_groups))
        problems = _problems(self)
        if problems:
            raise ConfigError("cannot make a layer of experts:\n" + "\n".join(f"  {problem}" for problem in problems))

    @property
    def of_all_tokens(self) -> tuple[str, ...]:
        """The options, `name=value`, with which it looks at all tokens of a microbatch, or has a loss of them.

        Where there are any it needs context["weight"] in training, for these losses.
        """
        looks = [f"kind={self.kind}"] * (self.kind != "topk")
        looks += [f"capacity_factor={self.capacity_factor}"] * (self.capacity_factor is not None)
        return *looks, *(f"{name}={getattr(self, name)}" for name in SIDE_LOSSES if getattr(self, name))

    @property
    def forbids_microbatches(self) -> str | None:
        """Why a step must be one microbatch, and what else to do; None if it may be cut."""
        if not self.global_aux_loss:
            return None
        return (
            "global_aux_loss is of the loads of the whole step, which are not known before the first backward.\n"
            "Use num_microbatches=1, or aux_loss, which is of the loads of each microbatch."
        )

    def capacity(self, num_tokens: int) -> int:
        """Rows that an expert takes of a group of so many tokens; there must be a `capacity_factor`."""
        assert self.capacity_factor is not None
        return math.ceil(num_tokens * self.top_k / self.num_experts * self.capacity_factor)


def _problems(config: MoeConfig) -> list[str]:
    """Everything that does not fit."""
    return [*_wrong_experts(config), *_wrong_values(config), *_wrong_options(config)]


def _wrong_experts(config: MoeConfig) -> list[str]:
    """What is wrong with the numbers of experts and their groups."""
    experts, found = config.num_experts, []
    sizes = {name: getattr(config, name) for name in ("num_experts", "top_k", "mlp_size")}
    found += [f"{name}={size}: must be a positive int" for name, size in sizes.items() if size < 1]
    if config.top_k > experts:
        found.append(f"top_k={config.top_k} is more than num_experts={experts}")
    if config.groups < 1 or experts % config.groups:
        found.append(f"groups={config.groups} does not divide num_experts={experts}")
    elif not 1 <= config.groups_kept <= config.groups or config.groups_kept * (experts // config.groups) < config.top_k:
        held = f"{config.groups_kept} of {config.groups} groups of {experts // config.groups} experts"
        found.append(f"groups_kept={config.groups_kept}: {held} do not hold top_k={config.top_k}")
    if config.group_best not in (1, 2):
        found.append(f"group_best={config.group_best}: it is 1 or 2")
    return found


def _wrong_values(config: MoeConfig) -> list[str]:
    """Fields whose value is none of those that they may have."""
    found = []
    choices = {
        "activation": tuple(ACTIVATIONS),
        "score": get_args(Score),
        "order": get_args(Order),
        "kind": get_args(RouterKind),
    }
    for name, known in choices.items():
        if getattr(config, name) not in known:
            found.append(f"{name}={getattr(config, name)!r}: there are {', '.join(known)}")
    for name in (*SIDE_LOSSES, "bias_rate"):
        value = getattr(config, name)
        if not _is_number(value) or value < 0:
            found.append(f"{name}={value!r}: must be a number >= 0")
    for name in ("capacity_factor", "clamp"):
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            found.append(f"{name}={value!r}: must be a number > 0, or None")
    for name in ("grouped", "padded"):
        if not isinstance(getattr(config, name), bool):
            found.append(f"{name}={getattr(config, name)!r}: must be True or False")
    return found


def _wrong_options(config: MoeConfig) -> list[str]:
    """Options that need, or exclude, another one."""
    found = []
    if config.padded and config.capacity_factor is None:
        found.append("padded=True needs a capacity: set capacity_factor, such as 1.25")
    if config.padded and not config.grouped:
        found.append("padded=True computes all experts at once: it needs grouped=True")
    groups = config.token_groups
    if not isinstance(groups, tuple) or len(groups) != 2 or any(type(n) is not int or n < 1 for n in groups):
        found.append(f"token_groups={groups!r}: must be two positive ints, parts of the sequences and of the positions")
    elif groups != (1, 1) and config.capacity_factor is None and not config.aux_loss and config.kind != "sinkhorn":
        found.append(f"token_groups={groups} changes nothing: it is for capacity_factor, aux_loss and kind='sinkhorn'")
    if config.shared_gate and config.shared is None:
        found.append("shared_gate=True needs a shared layer")
    if config.bias_rate and not config.choice_bias:
        found.append(
            f"bias_rate={config.bias_rate} moves a bias of the choice, which this model does not have (choice_bias=False)"
        )
    if config.kind != "topk" and (config.choice_bias or config.groups > 1):
        found.append(f"kind={config.kind!r} does not use the bias of the choice and groups: choose kind='topk'")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def with_router_options(config: MoeConfig, options: Mapping[str, object]) -> MoeConfig:
    """The same layer with `options`, of ROUTER_OPTIONS. Raises UnknownNameError with all others, or ConfigError."""
    unknown = sorted(set(options) - set(ROUTER_OPTIONS))
    if unknown:
        raise UnknownNameError(f"cannot set router options {unknown}: there are {', '.join(sorted(ROUTER_OPTIONS))}")
    fields: dict[str, Any] = dict(options)  # what does not fit its field is refused when the config is made
    return dataclasses.replace(config, **fields)
