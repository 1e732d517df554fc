"""A simulated step of a small Mamba-2 against plain autograd of the unsharded model, which has its own parity tests."""

import dataclasses

import pytest
import torch

from mpar import Mesh, State, models, testing, tree
from mpar.optimizer import Optimizer
from mpar.program.compile import compile_step
from mpar.strategy import preset

B, S, V = 8, 16, 90
CONFIG = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "use_bias": True,
}
CASES = {
    "tp": (Mesh(tp=2), "tp", {}, {}),
    "dp, tp": (Mesh(dp=2, tp=2), "tp_sp", {}, {}),
    "one group on two ranks": (Mesh(tp=2), "tp_sp", {"n_groups": 1}, {}),
    "two groups on four ranks": (Mesh(tp=4), "tp", {}, {}),
    "fsdp, tp": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", {"n_groups": 4}, {}),
    "gathered sequence": (Mesh(cp=2, tp=2), "tp_sp", {}, {"sequence": "contiguous"}),
    "sequence to heads": (Mesh(cp=2, tp=2), "tp_sp", {"n_groups": 4}, {"context_parallel": "all_to_all"}),
    "sequence to heads of one group": (Mesh(cp=2, tp=2), "tp", {"n_groups": 1}, {"context_parallel": "all_to_all"}),
}


class Recorder(Optimizer):
    """An optimizer that leaves parameters as they are and keeps the gradient as its state, where a test can read it."""

    slots = ("g",)

    def update_leaf(self, param, grad, slots, lr, step, scale, *, decays):
        return param.clone(), (grad.to(param.dtype),)

    def decays(self, path, leaf):
        return False

    def scale(self, norm):
        return torch.ones_like(norm)

    def rate(self, step):
        return 0.0


def problem(config, packed):
    """A model, parameters of which every one matters, a batch."""
    generator = torch.Generator().manual_seed(2)
    model = models.build("mamba2", {**CONFIG, **config}, dtype=torch.float64)
    params = tree.map_leaves(
        lambda leaf: leaf + 0.2 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), model.init(0)
    )
    batch = {key: torch.randint(0, V, (B, S), generator=generator) for key in ("tokens", "labels")}
    batch["labels"][torch.rand(B, S, generator=generator) < 0.3] = -100
    if packed:
        batch["documents"] = (torch.rand(B, S, generator=generator) < 0.2).cumsum(1)
    return model, params, batch


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("case", CASES)
def test_step_is_exact(case, packed):
    """Loss and every gradient equal those of one rank, and no op falls back to replication."""
    mesh, name, config, options = CASES[case]
    model, params, batch = problem(config, packed)
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss, weight = model.loss(tree.unflatten(structure, leaves), batch)
    grads = torch.autograd.grad(loss / weight, leaves)

    strategy = dataclasses.replace(preset(name), **options)
    shapes = {key: ((B, S), x.dtype) for key, x in batch.items()}
    program = compile_step(model, Recorder(), mesh, strategy, shapes, num_microbatches=2)
    assert program.facts.fallbacks == ()
    pairs = list(tree.leaves_with_path(params))
    state = State({f"params.{path}": x for path, x in pairs} | {f"opt.g.{path}": torch.zeros_like(x) for path, x in pairs})
    state, metrics = program.simulate(state, batch)
    testing.assert_close(metrics["loss"], (loss / weight).detach(), name="loss")
    for (path, _), grad in zip(pairs, grads, strict=True):
        testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=f"gradient of {path}")


def test_heads_travel_only_as_sums():
    """With the heads of one group on two ranks a layer adds up, forward, squares and its output; backward, gradients of squares,
    of b and c, which both ranks have, and once that of its input.
    """
    model, _, _ = problem({"n_groups": 1}, False)
    program = compile_step(model, Recorder(), Mesh(tp=2), preset("tp"), (B, S))
    inside = [use for use in program.collectives() if "mamba/_mamba.py" in use.line]
    tokens = B * S * 8  # of one float64 each
    forward, backward = [tokens, tokens * 16], [tokens, tokens * 6, tokens * 6, tokens * 16]
    assert {use.op for use in program.collectives()} == {"all_reduce"}
    assert [use.bytes for use in inside] == [*forward, *forward, *backward, *backward]


def test_a_sequence_is_exchanged_for_heads():
    """With all_to_all a layer exchanges x, b, c and the steps before the scan and its output after it, and the same backward."""
    model, _, _ = problem({}, False)
    strategy = dataclasses.replace(preset("ddp"), context_parallel="all_to_all")
    program = compile_step(model, Recorder(), Mesh(cp=2), strategy, (B, S))
    inside = [(use.op, use.bytes) for use in program.collectives() if "mamba/_mamba.py" in use.line]
    tokens = B * S // 2 * 8  # of a rank, one float64 each
    forward = [("all_to_all", tokens * size) for size in (12, 12, 32, 4, 32)]
    assert inside == [*forward, *forward, *forward[::-1], *forward[::-1]]
