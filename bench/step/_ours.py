"""Ours: a compiled program on one device."""

from typing import Any

import torch
from torch import Tensor

from bench.step._case import Case, Variant
from bench.step._data import first_weights, token_batches
from mpar import models
from mpar.hardware import hardware
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.models import Model
from mpar.models.hf import stored_leaves
from mpar.optim import AdamW
from mpar.program import Program, State, describe_kernels, format_bytes
from mpar.program.compile import compile_step

__all__ = ["OPTIMIZER", "Ours", "initial_state"]

OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 1.0
LOGITS_CHUNK = 4096
"""The most tokens whose logits are made at once; kernels take fewer where that is as fast."""
RECOMPUTE = ("none", "selective", "full")
FULL = 0.95
"""The largest share of a device's memory that a program may be predicted to need."""


class Ours:
    """Steps of mpar. `about` says how they are run; `predicted` is what the program predicts."""

    def __init__(self, case: Case, variant: Variant, device: torch.device) -> None:
        model = models.from_config(case.config(), logits_chunk=LOGITS_CHUNK)
        program, recompute = _compile(model, case, device)
        self.predicted = program.predict("h200").as_dict()
        kernels = describe_kernels(program.facts.kernels, (use for kind in program.kinds.values() for use in kind.kernels))
        self.about = f"recompute {recompute}; {kernels}"
        self._state = initial_state(program, model, device)
        self._run = program.bind(device=device, execution=variant.execution)
        self._batches = token_batches(case, device)
        self._steps = 0

    def step(self) -> Tensor:
        """One step; its loss, on the device."""
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        self._state, metrics = self._run(self._state, batch)
        return metrics["loss"]


def initial_state(program: Program, model: Model, device: torch.device) -> State:
    """The state before the first step, made on the device leaf by leaf."""
    leaves, deviation = {}, model.config.initializer_range
    stored = stored_leaves(model)
    for leaf in program.state_in:
        kind, _, path = leaf.path.partition(".")
        if kind != "params":
            leaves[leaf.path] = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            continue
        made = stored[path]
        whole = {name: first_weights(name, made.stored_shape, deviation, device) for name in made.names}
        bounds = [(0, size) for size in made.shape]
        leaves[leaf.path] = made.read(lambda name, block, whole=whole: whole[name][block], bounds).to(leaf.dtype)
    return State(leaves)


def _compile(model: Model, case: Case, device: torch.device) -> tuple[Program, str]:
    """The program that recomputes least among those that fit. Raises RuntimeError if none does."""
    optimizer = AdamW(**_settings())
    limit = FULL * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
    for recompute in RECOMPUTE:
        program = compile_step(
            model,
            optimizer,
            Mesh(),
            "ddp",
            (case.sequences, case.seq_len),
            precision="bf16",
            recompute=recompute,
            kernels=kernels_for("auto", device),
            hardware=hardware("h200"),
        )
        prediction = program.predict()
        if prediction.need_bytes <= limit:
            return program, recompute
    raise RuntimeError(
        f"no program fits: with recompute {recompute} it is predicted to need {format_bytes(prediction.peak_bytes)}"
    )


def _settings() -> dict[str, Any]:
    return {**OPTIMIZER, "decay": "all", "clip_norm": CLIP_NORM}
