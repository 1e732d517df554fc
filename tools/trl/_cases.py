"""What is compared: a task of mpar with its options, what each version of TRL calls it, and which versions should agree."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.tasks import Cpo, Dpo, Kto, Orpo, Reward, Task

__all__ = ["CASES", "OLD", "ROWS", "Case"]

OLD = "0.24"
"""Versions of TRL that begin so take the options `old` of a case."""

ROWS = [
    {"prompt": "5 9 3", "chosen": " 4 7 8 0 6", "rejected": " 11 4", "margin": 0.25},
    {"prompt": "6 3 8 8", "chosen": " 12 3", "rejected": " 5 14 10 9 3 3 7", "margin": 0.5},
    {"prompt": "9 4 15", "chosen": " 0 13 10 6", "rejected": " 4 15 0", "margin": -0.25},
    {"prompt": "3 7 7 12 5", "chosen": " 6 9 9", "rejected": " 14 13 8 8", "margin": 1.0},
]
"""Numbers are tokens. An answer is ended by token 1."""


@dataclass(frozen=True)
class Case:
    """A task beside a trainer. options, old: those of TRL from 1.0 on, and of 0.24; `differs`: why a version has another number,
    by the beginning of its name. A version that refuses the options is not compared."""

    task: Task
    trainer: str
    options: Mapping[str, object] = field(default_factory=dict)
    old: Mapping[str, object] | None = None
    differs: Mapping[str, str] = field(default_factory=dict)

    def asked(self, version: str) -> dict[str, object]:
        """What a version is asked."""
        options = self.old if self.old is not None and version.startswith(OLD) else self.options
        return {"trainer": self.trainer, "options": dict(options)}


def _dpo(name: str, *, differs: Mapping[str, str] | None = None, smoothing: float = 0.0) -> Case:
    options = {"loss_type": [name], "label_smoothing": smoothing, "beta": 0.3}
    return Case(Dpo(losses=((name, 1.0),), beta=0.3, label_smoothing=smoothing), "DPO", options, differs=differs or {})


_TOKENS = "mean over the tokens of all answers, not of each"
CASES: Mapping[str, Case] = {
    **{f"dpo {name}": _dpo(name) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down")},
    "dpo discopop": _dpo("discopop"),
    "dpo sigmoid_norm": _dpo("sigmoid_norm"),
    "dpo robust, smoothing 0.1": _dpo("robust", smoothing=0.1),
    "dpo exo_pair, smoothing 0.1": _dpo("exo_pair", smoothing=0.1),
    "dpo exo_pair": _dpo("exo_pair"),
    "dpo sigmoid, smoothing 0.1": _dpo("sigmoid", smoothing=0.1, differs={"1.": "smoothing is ignored"}),
    "dpo bco_pair": _dpo("bco_pair", differs={OLD: "rewards are shifted by a running mean"}),
    "dpo sigmoid + 0.5 sft": Case(
        Dpo(beta=0.3, rpo_alpha=0.5),
        "DPO",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
        {"beta": 0.3, "rpo_alpha": 0.5},
        {"1.": _TOKENS, OLD: f"{_TOKENS}; token 0 is left out, prompts count"},
    ),
    "dpo ld_alpha 0.4": Case(
        Dpo(beta=0.3, ld_alpha=0.4), "DPO", {"beta": 0.3, "ld_alpha": 0.4}, differs={OLD: "positions of the prompt are counted"}
    ),
    "dpo forward_kl": Case(Dpo(beta=0.3, divergence="forward_kl"), "DPO", {"beta": 0.3, "f_divergence_type": "forward_kl"}),
    "dpo js": Case(Dpo(beta=0.3, divergence="js"), "DPO", {"beta": 0.3, "f_divergence_type": "js_divergence"}),
    "dpo alpha 0.5": Case(
        Dpo(beta=0.3, divergence="alpha", divergence_alpha=0.5),
        "DPO",
        {"beta": 0.3, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    ),
    "kto": Case(Kto(beta=0.3), "KTO", {"beta": 0.3}),
    "kto, weights 1 and 1.3": Case(Kto(beta=0.3, undesirable_weight=1.3), "KTO", {"beta": 0.3, "undesirable_weight": 1.3}),
    "kto apo_zero_unpaired": Case(
        Kto(beta=0.3, loss_type="apo_zero_unpaired"), "KTO", {"beta": 0.3, "loss_type": "apo_zero_unpaired"}
    ),
    "orpo": Case(Orpo(beta=0.3), "ORPO", {"beta": 0.3}, differs={"": _TOKENS}),
    "cpo": Case(Cpo(beta=0.3), "CPO", {"beta": 0.3}, differs={"": _TOKENS}),
    "cpo_alpha 0": Case(Cpo(beta=0.3, cpo_alpha=0.0), "CPO", {"beta": 0.3, "cpo_alpha": 0.0}),
    "cpo hinge": Case(
        Cpo(beta=0.3, cpo_alpha=0.0, loss_type="hinge"), "CPO", {"beta": 0.3, "cpo_alpha": 0.0, "loss_type": "hinge"}
    ),
    "cpo ipo": Case(Cpo(beta=0.3, cpo_alpha=0.0, loss_type="ipo"), "CPO", {"beta": 0.3, "cpo_alpha": 0.0, "loss_type": "ipo"}),
    "simpo": Case(
        Cpo(beta=2.0, cpo_alpha=0.0, loss_type="simpo", gamma=1.0),
        "CPO",
        {"beta": 2.0, "cpo_alpha": 0.0, "loss_type": "simpo", "simpo_gamma": 1.0},
    ),
    "reward": Case(Reward(margin="data", centre=0.01), "Reward", {"center_rewards_coefficient": 0.01}),
}
