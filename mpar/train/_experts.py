"""How evenly a router spreads tokens over the experts of its layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ExpertLoad", "expert_load", "side_losses"]

_COUNTS, _DROPPED = ".expert_counts", ".dropped"
_NO_SIDE_LOSSES = ("loss", "microbatch_losses", "weight", "grad_norm", "skipped", "lr")


@dataclass(frozen=True)
class ExpertLoad:
    """How evenly one layer used its experts in one step. A slot is one choice of an expert by a token.

    max_load: slots of the most chosen expert, divided by the mean: from 1 (even) to the number of experts.
    entropy:  entropy of the experts' shares of the slots, over that of equal shares: from 0 (one expert has all) to 1 (even).
    dropped:  the share of the slots that did not fit into the capacity of their expert.
    slots:    how many slots there were.
    """

    max_load: float
    entropy: float
    dropped: float
    slots: int


def expert_load(metrics: Mapping[str, Tensor]) -> dict[str, ExpertLoad]:
    """The load of every segment with experts, from the metrics of a step: `<segment>.expert_counts`, of shape (E,), and, where
    experts have a capacity, `<segment>.dropped`.
    """
    loads = {}
    for name, counts_E in metrics.items():
        if not name.endswith(_COUNTS):
            continue
        segment = name.removesuffix(_COUNTS)
        counts_E = counts_E.detach().to("cpu", torch.float64)
        slots, num_experts = float(counts_E.sum()), counts_E.numel()
        shares_E = counts_E / max(slots, 1.0)
        entropy = float(torch.special.entr(shares_E).sum()) / math.log(num_experts) if num_experts > 1 else 1.0
        dropped = float(metrics[segment + _DROPPED]) / max(slots, 1.0) if segment + _DROPPED in metrics else 0.0
        loads[segment] = ExpertLoad(float(shares_E.max()) * num_experts, entropy, dropped, round(slots))
    return loads


def side_losses(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """The side losses among the metrics of a step, by name."""
    return {name: float(value) for name, value in metrics.items() if name not in _NO_SIDE_LOSSES and "." not in name}
