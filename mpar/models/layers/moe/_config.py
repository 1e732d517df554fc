"""The config of a layer of experts: sizes, router, capacity, side losses; and the check of its values."""

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
"""The fields that `with_router_options` sets: choices for training, which a checkpoint does not contain."""


@dataclass(frozen=True)
class MoeConfig:
    """Everything that the mathematics of the layer depends on.

    score, order, normalise, groups, groups_kept, group_best, scale: see `ops.topk_router`.
    mlp_size:        hidden features of each expert. activation: a key of ACTIVATIONS. mlp_bias: whether experts have biases.
    clamp:           None, or a limit L: instead of the activation, an expert then computes
                     gate * sigmoid(clamp_alpha * gate) * (up + 1), with gate clamped to at most L and up to [-L, L].
    shared:          a feed-forward layer that every token goes through, None for none. shared_gate: its result is multiplied by
                     sigmoid(x @ w).
    router_bias:     whether the logits have a bias.
    choice_bias:     whether a bias is added for the choice of experts, but not for their weights. It has no gradient: after each
                     step it moves by `bias_rate`.
    kind:            "topk" chooses the best experts. "sinkhorn" chooses from logits that are balanced over the microbatch.
                     "balanced", for benchmarks, sends slot i = token * top_k + k to expert i mod num_experts.
    capacity_factor: None, or an expert takes at most ceil(factor * tokens * top_k / num_experts) slots of a microbatch, those of
                     the largest weights. Capacity and the kinds "sinkhorn" and "balanced" make a token depend on the other
                     tokens, so only training uses them; in evaluation and generation the kind is "topk" and no slot is dropped.
    token_groups:    (g, h) divides a microbatch into g * h groups of tokens: its rows, as they are stored, into g equal parts and
                     their positions into h. The capacity is then counted for each group, "sinkhorn" balances within it, and
                     aux_loss is the mean over groups.
    padded:          an expert computes as many rows as its capacity allows, with zeros for missing tokens. The result is the
                     same, but no shape depends on data, so the host need not wait for a number from the device.
    aux_loss ...:    coefficients of the side losses, 0 for none; see `moe`.
    grouped:         False computes one expert after the other on all tokens, as a reference.
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
        if isinstance(self.token_groups, list):  # configuration files can write lists only
            object.__setattr__(self, "token_groups", tuple(self.token_groups))
        problems = _problems(self)
        if problems:
            raise ConfigError("cannot make a layer of experts:\n" + "\n".join(f"  {problem}" for problem in problems))

    @property
    def of_all_tokens(self) -> tuple[str, ...]:
        """The options, as `name=value`, because of which the layer looks at all tokens of a microbatch or has a loss over them.

        If there are any, the layer needs context["weight"] in training.
        """
        options = [f"kind={self.kind}"] * (self.kind != "topk")
        options += [f"capacity_factor={self.capacity_factor}"] * (self.capacity_factor is not None)
        return *options, *(f"{name}={getattr(self, name)}" for name in SIDE_LOSSES if getattr(self, name))

    @property
    def forbids_microbatches(self) -> str | None:
        """Why the batch of a step cannot be cut into microbatches, and what to do instead; None if it can."""
        if not self.global_aux_loss:
            return None
        return (
            "global_aux_loss is computed from the loads of the whole step, which are not known before the first backward.\n"
            "Use num_microbatches=1, or aux_loss, which is computed from the loads of each microbatch."
        )

    def capacity(self, num_tokens: int) -> int:
        """How many slots of a group of `num_tokens` tokens an expert takes at most; there must be a `capacity_factor`."""
        assert self.capacity_factor is not None
        return math.ceil(num_tokens * self.top_k / self.num_experts * self.capacity_factor)


def _problems(config: MoeConfig) -> list[str]:
    """Everything that does not fit."""
    return [*_wrong_experts(config), *_wrong_values(config), *_wrong_options(config)]


def _wrong_experts(config: MoeConfig) -> list[str]:
    """What is wrong with the numbers of experts and their groups."""
    experts, problems = config.num_experts, []
    sizes = {name: getattr(config, name) for name in ("num_experts", "top_k", "mlp_size")}
    problems += [f"{name}={size}: must be a positive int" for name, size in sizes.items() if size < 1]
    if config.top_k > experts:
        problems.append(f"top_k={config.top_k} is more than num_experts={experts}")
    if config.groups < 1 or experts % config.groups:
        problems.append(f"groups={config.groups} does not divide num_experts={experts}")
    elif not 1 <= config.groups_kept <= config.groups or config.groups_kept * (experts // config.groups) < config.top_k:
        kept_groups = f"{config.groups_kept} of {config.groups} groups of {experts // config.groups} experts"
        problems.append(f"groups_kept={config.groups_kept}: {kept_groups} do not hold top_k={config.top_k}")
    if config.group_best not in (1, 2):
        problems.append(f"group_best={config.group_best}: must be 1 or 2")
    return problems


def _wrong_values(config: MoeConfig) -> list[str]:
    """Fields with a value that is not allowed."""
    problems = []
    choices = {
        "activation": tuple(ACTIVATIONS),
        "score": get_args(Score),
        "order": get_args(Order),
        "kind": get_args(RouterKind),
    }
    for name, known in choices.items():
        if getattr(config, name) not in known:
            problems.append(f"{name}={getattr(config, name)!r}: there are {', '.join(known)}")
    for name in (*SIDE_LOSSES, "bias_rate"):
        value = getattr(config, name)
        if not _is_number(value) or value < 0:
            problems.append(f"{name}={value!r}: must be a number >= 0")
    for name in ("capacity_factor", "clamp"):
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            problems.append(f"{name}={value!r}: must be a number > 0, or None")
    for name in ("grouped", "padded"):
        if not isinstance(getattr(config, name), bool):
            problems.append(f"{name}={getattr(config, name)!r}: must be True or False")
    return problems


def _wrong_options(config: MoeConfig) -> list[str]:
    """Options that need another option, or exclude one."""
    problems = []
    if config.padded and config.capacity_factor is None:
        problems.append("padded=True needs a capacity: set capacity_factor, such as 1.25")
    if config.padded and not config.grouped:
        problems.append("padded=True computes all experts at once: it needs grouped=True")
    groups = config.token_groups
    if not isinstance(groups, tuple) or len(groups) != 2 or any(type(n) is not int or n < 1 for n in groups):
        problems.append(f"token_groups={groups!r}: must be two positive ints, numbers of parts of rows and of positions")
    elif groups != (1, 1) and config.capacity_factor is None and not config.aux_loss and config.kind != "sinkhorn":
        problems.append(f"token_groups={groups} changes nothing: it is for capacity_factor, aux_loss and kind='sinkhorn'")
    if config.shared_gate and config.shared is None:
        problems.append("shared_gate=True needs a shared layer")
    if config.bias_rate and not config.choice_bias:
        problems.append(
            f"bias_rate={config.bias_rate} moves a bias of the choice, which this model does not have (choice_bias=False)"
        )
    if config.kind != "topk" and (config.choice_bias or config.groups > 1):
        problems.append(f"kind={config.kind!r} does not use the bias of the choice and groups: choose kind='topk'")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def with_router_options(config: MoeConfig, options: Mapping[str, object]) -> MoeConfig:
    """The same layer with `options`, whose keys are in ROUTER_OPTIONS.

    Raises UnknownNameError, listing all other keys, and ConfigError for values that do not fit.
    """
    unknown = sorted(set(options) - set(ROUTER_OPTIONS))
    if unknown:
        raise UnknownNameError(f"cannot set router options {unknown}: there are {', '.join(sorted(ROUTER_OPTIONS))}")
    fields: dict[str, Any] = dict(options)  # the new config refuses values that do not fit
    return dataclasses.replace(config, **fields)
