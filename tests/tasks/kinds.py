"""The tasks that are tried on meshes, and a batch with every entry that one of them reads."""

import functools
from typing import Any

import torch
from torch import Tensor

from mpar import adapters, models
from mpar.models import Trainable
from mpar.tasks import DPO_LOSSES, Cpo, Dft, Dpo, Gkd, Grpo, Kto, Orpo, Ppo, Prm, Reward, Task
from tests.meshes import Place
from tests.program import oracle
from tests.program.oracle import MOE
from tests.tasks.problem import LENGTHS, QWEN3, Problem, answers_batch

__all__ = ["OFF", "TASKS", "full_batch", "problem_of", "with_adapter"]

EXPERTS = {**MOE, "router_aux_loss_coef": 0.01}
EVERY_LOSS = tuple((name, 0.5 + number / 7) for number, name in enumerate(DPO_LOSSES))
OFF = "the policy without its adapter"
TEACHER = "a deeper, narrower model with other rotations"
TASKS: dict[str, tuple[Task | None, bool | str]] = {
    "sft": (None, False),
    "dpo, every loss": (Dpo(losses=EVERY_LOSS, label_smoothing=0.1, rpo_alpha=0.2), True),
    "dpo, columns": (Dpo(reference="columns", ld_alpha=0.5, beta="data", divergence="js"), False),
    "dpo, adapter off": (Dpo(losses=(("ipo", 1.0), ("sigmoid", 0.3))), OFF),
    "kto": (Kto(reference="columns"), False),
    "kto, model": (Kto(loss_type="apo_zero_unpaired", desirable_weight=1.5), True),
    "orpo": (Orpo(), False),
    "simpo": (Cpo(loss_type="simpo"), False),
    "cpo": (Cpo(), False),
    "reward": (Reward(margin="data", centre=0.1), False),
    "prm": (Prm(), False),
    "dft": (Dft(), False),
    "grpo, answers": (Grpo(loss_type="grpo", ratio="sequence"), False),
    "grpo, tokens": (Grpo(beta=0.1, weigh_kl=True, epsilon_high=0.3), True),
    "ppo": (Ppo(), True),
    "ppo, alone": (Ppo(beta=0.0, value_weight=1.0), False),
    "gkd": (Gkd(beta=0.3, temperature=0.9), TEACHER),
    "gkd, forward": (Gkd(beta=0.0), True),
}
"""By name the task, None for the loss of the next token; and its reference: none, a frozen copy in the same program, OFF, or
TEACHER."""


def full_batch(name: str = "") -> dict[str, Tensor]:
    """Answers with every column and position that a task reads. KTO and ORPO have answers and labels of their own."""
    batch = answers_batch()
    ends = torch.full_like(batch["answers"], -1)
    for row, lengths in enumerate(LENGTHS):
        for number in range(len(lengths)):
            ends[row, sum(lengths[: number + 1]) - 1] = number
    if name.startswith("kto"):
        batch["signs"] = torch.where((torch.arange(4) % 2 == 1) & (batch["signs"] >= 0), 2, batch["signs"])
        batch["signs"][1, 0] = 0
    if name == "orpo":
        batch["labels"] = batch["all_labels"]
    generator = torch.Generator().manual_seed(9)
    old_logps = torch.randn(batch["tokens"].shape, generator=generator, dtype=torch.float64) - 4
    advantages = torch.randn(batch["signs"].shape, generator=generator, dtype=torch.float64)
    tokens = torch.randn(3, *batch["tokens"].shape, generator=generator, dtype=torch.float64)
    of_tokens = zip(("old_values", "token_advantages", "returns"), tokens.masked_fill(batch["answers"] < 0, 0.0), strict=True)
    return {
        **batch,
        **dict(of_tokens),
        "ends": ends,
        "step_labels": torch.where(ends >= 0, ends % 2, -1),
        "old_logps": torch.where(batch["answers"] >= 0, old_logps, 0.0),
        "advantages": torch.where(batch["signs"] >= 0, advantages, 0.0),
    }


def _teacher() -> Trainable:
    sizes = {"num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "rope_theta": 500.0}
    return models.from_config({**QWEN3, **sizes}, dtype=torch.float64, vocab_multiple=8)


def with_adapter(model: Any) -> Any:
    """A model with a small adapter, which alone is trained."""
    return adapters.add(model, adapters.LoRA(rank=2, alpha=4))


def problem_of(name: str, place: Place, **options: Any) -> Any:
    """The problem of a task for the model of a place, with what one rank gives for it."""
    count = options.pop("num_microbatches", place.num_microbatches)
    return _made(name, place.expert_parallel > 1, place.num_layers, count, *options.items())


@functools.cache
def _made(name: str, of_experts: bool, num_layers: int, num_microbatches: int, *options: Any) -> Any:
    config = {**(EXPERTS if of_experts else QWEN3), "num_hidden_layers": num_layers}
    task, reference = TASKS[name]
    if task is None:
        return oracle.Problem(config, (4, 16), packed=True, num_microbatches=num_microbatches, **dict(options))
    how = {"adapt": with_adapter} if reference == OFF else {"reference": _teacher() if reference == TEACHER else reference}
    return Problem(task, config=config, batch=full_batch(name), num_microbatches=num_microbatches, **how, **dict(options))
