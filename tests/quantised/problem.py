"""Whole steps of a quantised model with adapters: what plain torch gives with the dequantised weights."""

from collections.abc import Mapping
from typing import Any

import torch

from mpar import adapters, testing, tree
from mpar.adapters import LoRA
from mpar.program import Program, State
from mpar.quantised import quantise
from tests.program.oracle import Problem

__all__ = ["QuantisedProblem"]

SHAPE = (8, 16)


class QuantisedProblem:
    """A quantised model with adapters: its parameters, and what plain torch gives with the dequantised ones."""

    def __init__(self, config: Mapping[str, Any], kind: str, lora: LoRA, num_microbatches: int = 1) -> None:
        plain = Problem(config, SHAPE, num_microbatches=num_microbatches, adapt=lambda model: adapters.add(model, lora))
        self.chain = self.model = quantise(plain.model, kind)
        smaller = tree.map_leaves(lambda leaf: leaf if leaf.ndim == 1 else 0.3 * leaf, plain.params)
        self.params = self.model.quantise_params(smaller)
        plain.params = self.model.dequantise_params(self.params, torch.float64)
        plain.differentiate()
        self.plain, self.batch, self.shapes = plain, plain.batch, plain.shapes
        self.trained = [path for path in tree.paths(self.params) if path not in self.model.frozen]

    def state(self) -> State:
        """Global, before the first step."""
        leaves = {f"params.{path}": x for path, x in tree.leaves_with_path(self.params)}
        zeros = {f"opt.g.{path}": torch.zeros_like(leaves[f"params.{path}"]) for path in self.trained}
        return State(leaves | zeros)

    def check(self, program: Program) -> None:
        """Assert that loss and gradients of adapters equal those of plain torch; nothing else has a gradient or state."""
        assert program.facts.fallbacks == ()
        state, metrics = program.simulate(self.state(), self.batch)
        testing.assert_close(metrics["loss"], self.plain.loss, name="loss")
        norm = torch.sqrt(sum(self.plain.grads[path].square().sum() for path in self.trained))
        testing.assert_close(metrics["grad_norm"], norm, name="gradient norm")
        for path in self.trained:
            testing.assert_close(state.leaves[f"opt.g.{path}"], self.plain.grads[path], name=path)
        assert {path for path in state.leaves if path.startswith("opt.")} == {f"opt.g.{path}" for path in self.trained}
