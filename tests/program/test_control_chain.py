"""A chain whose segment has loops: a step is compiled, proved, simulated, and equal to plain torch with loops of Python."""

import pytest
import torch
from torch._higher_order_ops.scan import scan

from mpar import Mesh, ops, testing, tree
from mpar.chain import Chain, Segment
from mpar.program.compile import compile_step
from tests.forecast.test_memory import trackers
from tests.program.test_exactness import Recorder, initial_state

B, S, V, D, F = 4, 6, 16, 8, 16
SHAPES = {
    "embed": (V, D),
    "layers": tuple({"in_DF": (D, F), "gate_DF": (D, F), "again_F": (F,), "down_FD": (F, D)} for _ in range(2)),
    "head": (D, V),
}

AXES = {
    "embed": ("vocab", "embed"),
    "layers": tuple(
        {"in_DF": ("embed", "mlp"), "gate_DF": ("embed", "mlp"), "again_F": ("mlp",), "down_FD": ("mlp", "embed")}
        for _ in range(2)
    ),
    "head": ("embed", "vocab"),
}


def embed(params, x, context, *, training):
    return ops.embedding(context["tokens"], params[0]), {}


def layer(params, x_BSD, context, *, training, scan=scan, cond=torch.cond):
    """A gated recurrence over positions, whose decays depend on the tokens; rows that grow too much are scaled down."""
    (params,) = params
    in_BSF, gate_BSF = x_BSD @ params["in_DF"], torch.sigmoid(x_BSD @ params["gate_DF"])

    def step(h_BF, given):
        in_BF, gate_BF = given
        h_BF = torch.tanh(gate_BF * h_BF * params["again_F"] + in_BF)
        return h_BF, h_BF.clone()

    _, h_SBF = scan(step, torch.zeros_like(in_BSF[:, 0]), (in_BSF.transpose(0, 1), gate_BSF.transpose(0, 1)))
    out_BSD = h_SBF.transpose(0, 1) @ params["down_FD"]
    norm = out_BSD.norm()
    return x_BSD + cond(norm > 1, lambda x: x / x.norm(), lambda x: x * 2, (out_BSD,)), {}


def head(params, x_BSD, context, *, training):
    return None, {"loss": ops.cross_entropy(x_BSD @ params[0], context["labels"])[0]}


class Recurrent(Chain):
    """An embedding, two recurrent layers, logits."""

    segments = (
        Segment("embed", embed, ("embed",), out_axes=("batch", "seq", "embed")),
        *(Segment(f"layers[{i}]", layer, (f"layers.{i}",), out_axes=("batch", "seq", "embed")) for i in range(2)),
        Segment("head", head, ("head",)),
    )
    param_axes = property(lambda self: AXES)
    batch_axes = property(lambda self: dict.fromkeys(("tokens", "labels"), ("batch", "seq")))
    abstract_params = property(lambda self: made(SHAPES, lambda shape: torch.empty(shape, dtype=torch.float64, device="meta")))

    def weight(self, batch):
        return torch.ones_like(batch["tokens"], dtype=torch.float64).sum()

    def context(self, batch, row_length=None):
        return batch


def made(shapes, make):
    if isinstance(shapes, dict):
        return {name: made(value, make) for name, value in shapes.items()}
    return make(shapes) if isinstance(shapes[0], int) else tuple(made(value, make) for value in shapes)


def python_scan(combine, init, xs):
    carry, ys = init, []
    for given in zip(*xs, strict=True):
        carry, y = combine(carry, given)
        ys.append(y)
    return carry, torch.stack(ys)


def python_cond(predicate, if_true, if_false, operands):
    return if_true(*operands) if predicate else if_false(*operands)


def reference(params, batch):
    x_BSD = params["embed"][batch["tokens"]]
    for each in params["layers"]:
        x_BSD, _ = layer((each,), x_BSD, batch, training=True, scan=python_scan, cond=python_cond)
    return torch.nn.functional.cross_entropy((x_BSD @ params["head"]).flatten(0, 1), batch["labels"].flatten())


def differentiated(params, batch):
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = reference(tree.unflatten(structure, leaves), batch)
    return loss.detach(), dict(zip(tree.paths(params), torch.autograd.grad(loss, leaves), strict=True))


@pytest.mark.parametrize(
    ("mesh", "strategy", "options"),
    [
        (Mesh(dp=2, tp=2), "tp_sp", {}),
        (Mesh(fsdp=2, tp=2), "zero3_tp", {"recompute": "full"}),
        (Mesh(pp=2, tp=2), "tp", {}),
    ],
    ids=["dp2 x tp2", "fsdp2 x tp2", "pp2 x tp2"],
)
def test_a_chain_with_loops(mesh, strategy, options):
    """Loss and gradients of a step are those of plain torch; the program is proved, and its peak predicted to the byte."""
    generator = torch.Generator().manual_seed(3)
    params = made(SHAPES, lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5)
    batch = {key: torch.randint(0, V, (B, S), generator=generator) for key in ("tokens", "labels")}
    program = compile_step(Recurrent(), Recorder(), mesh, strategy, (B, S), **options)
    program.verify()
    assert program.facts.fallbacks == ()
    loss, grads = differentiated(params, batch)
    state, metrics = program.simulate(initial_state(params), batch)
    testing.assert_close(metrics["loss"], loss, name="loss")
    for path, grad in grads.items():
        testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=f"gradient of {path}")
    if len(program.parts) == 1:  # the trackers hold the state of all positions
        held = [tracker.peak for tracker in trackers(program, initial_state(params), batch)]
        assert held == program.peaks() * mesh.size
