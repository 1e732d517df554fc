"""SOAP against algorithm 3 of its paper in numpy, alone and on meshes; slots whose dims are not those of their parameter."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import mpar
from mpar import models, ops, testing, tree
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.optim import SOAP, AdamW, Lion
from mpar.optimizer import leaf_rule
from tests.optim.test_muon import AXES, CONFIG, STEPS, gradient, make_params, run_ours

RATE, EVERY, EPS, DECAY = 0.01, 7, 1e-8, 0.3


def by_the_paper(start, beta1, beta2):
    """Algorithm 3 with Adam's correction of biases and decoupled decay. Q begins as the identity; `Eigenvectors` is a full
    decomposition for the first time, and algorithm 4 after that.
    """
    w = start.numpy()
    m, v, left, right = np.zeros_like(w), np.zeros_like(w), np.zeros((w.shape[0],) * 2), np.zeros((w.shape[1],) * 2)
    q_left, q_right = np.eye(w.shape[0]), np.eye(w.shape[1])
    for t in range(1, STEPS + 1):
        g = gradient(torch.tensor(w), t).numpy()
        rotated = q_left.T @ g @ q_right
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * rotated**2
        step = (q_left.T @ m @ q_right) / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + EPS)
        w = w - RATE * (q_left @ step @ q_right.T) - RATE * DECAY * w
        left, right = beta2 * left + (1 - beta2) * g @ g.T, beta2 * right + (1 - beta2) * g.T @ g
        if t == EVERY:
            q_left, q_right = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
        elif t % EVERY == 0:
            q_left, q_right = (np.linalg.qr(x @ q)[0] for x, q in ((left, q_left), (right, q_right)))
    return torch.tensor(w)


def test_soap_follows_the_paper():
    """100 steps in float64: matrices equal the paper's algorithm, a norm torch.optim.AdamW."""
    betas = (0.9, 0.95)
    ours, state = run_ours(SOAP(RATE, betas, EPS, DECAY, EVERY))
    for name, start in make_params().items():
        if start.ndim == 2:
            testing.assert_close(ours[name], by_the_paper(start, *betas), name=name, rtol=1e-9)
            shapes = {slot: tuple(state.slots[slot][name].shape) for slot in ("v", "left", "right_basis")}
            assert shapes == {"v": (*start.shape,), "left": (start.shape[0],) * 2, "right_basis": (start.shape[1],) * 2}
            continue
        param = torch.nn.Parameter(start)
        theirs = torch.optim.AdamW([param], lr=RATE, betas=betas, weight_decay=0.0)
        for step in range(1, STEPS + 1):
            param.grad = gradient(param.detach(), step)
            theirs.step()
        testing.assert_close(ours[name], param.detach(), name=name, rtol=1e-9)
        assert state.slots["left"][name].numel() == 0


def test_the_first_steps_are_those_of_adam():
    """Until the first eigenvectors are computed a matrix takes the steps of AdamW."""
    soap, adamw = (run_ours(cls(RATE, (0.9, 0.95), EPS, DECAY, **more))[0] for cls, more in SETTINGS)
    for name in AXES:
        testing.assert_close(soap[name], adamw[name], name=name, rtol=1e-11)


SETTINGS = ((SOAP, {"precondition_frequency": STEPS}), (AdamW, {}))


def test_merged_dims_and_experts(make_tensor):
    """Dims of heads are one side, and experts are matrices each: the update of one matrix at a time. Matrices are square, since
    eigenvectors of an eigenvalue that is there twice, as 0 would be, may be any."""
    rule = leaf_rule(SOAP(RATE, precondition_frequency=1), "layers.0.q_EDNH", ("expert", "embed", "heads", "head"))
    one = leaf_rule(SOAP(RATE, precondition_frequency=1), "layers.0.q_DF", ("embed", "mlp"))
    param, grads = make_tensor((2, 6, 3, 2), torch.float64), make_tensor((3, 2, 6, 3, 2), torch.float64)
    slots = [torch.zeros([param.shape[dim] for dim in rule.slot_dims(slot, 4)], dtype=torch.float64) for slot in rule.slots]
    flat = [x.flatten(1) for x in param]
    flat_slots = [[torch.zeros([x.shape[dim] for dim in one.slot_dims(slot, 2)]).double() for slot in one.slots] for x in flat]
    for t, grad in enumerate(grads, 1):
        scalars = (torch.tensor(0.1).double(), torch.tensor(float(t)).double(), torch.tensor(1.0).double())
        param, slots = rule.update_leaf(param, grad, tuple(slots), *scalars, decays=True)
        updated = zip(flat, grad, flat_slots, strict=True)
        results = [one.update_leaf(x, g.flatten(1), tuple(s), *scalars, decays=True) for x, g, s in updated]
        flat, flat_slots = [x for x, _ in results], [s for _, s in results]
    for index in range(2):
        testing.assert_close(param[index].flatten(1), flat[index], name="param", rtol=1e-10)


def test_the_sharding_rule_of_eigenbasis(make_tensor):
    """It holds where matrices are on different ranks, and where the dims of a matrix are sharded; at every kind of step."""
    matrix = make_tensor((4, 8, 8), torch.float64)
    matrix = matrix @ matrix.mT
    for step in (1.0, 2.0, 3.0, 5.0):
        operands = (matrix, make_tensor((4, 8, 8), torch.float64), torch.tensor(step, dtype=torch.float64))
        assert mpar.check(ops.PRIMITIVES["eigenbasis"], operands, {"dims": 1, "every": 2}) == ("leading0", "r0", "c0")


def test_what_eigenbasis_refuses(make_tensor):
    """Matrices that are not square, a step that is no scalar, integers."""
    x, step = make_tensor((3, 3)), torch.tensor(1.0)
    with pytest.raises(ShapeError, match="must have one shape"):
        ops.eigenbasis(make_tensor((3, 4)), make_tensor((3, 4)), step, every=1)
    with pytest.raises(ShapeError, match="step is a scalar"):
        ops.eigenbasis(x, x, x, every=1)
    with pytest.raises(ConfigError, match="every=0"):
        ops.eigenbasis(x, x, step, every=0)
    with pytest.raises(DtypeError, match="floating"):
        ops.eigenbasis(x.long(), x.long(), step, every=1)


STEPS_OF_MESHES = 50  # 100 differ by up to 1.1e-11: power iteration passes on what rounding changes in small eigenvalues


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [({"dp": 2}, "ddp"), ({"fsdp": 4}, "zero3"), ({"fsdp": 2, "tp": 2}, "zero3_tp"), ({"pp": 2, "dp": 2}, "zero1")],
)
def test_meshes_agree(mesh, strategy):
    """50 steps in float64 on a mesh equal those on one rank."""
    model = models.from_config(CONFIG, models.ModelOptions(dtype=torch.float64))
    tokens = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def train(mesh, strategy):
        program = mpar.compile_step(model, SOAP(1e-3), mesh, strategy, (8, 16), num_microbatches=2)
        state = program.init_state(tree.map_leaves(torch.clone, model.init(seed=0)))
        for _ in range(STEPS_OF_MESHES):
            state, _ = program.simulate(state, batch)
        return program, state.leaves

    _, expected = train(mpar.Mesh(dp=1), "ddp")
    program, actual = train(mpar.Mesh(**mesh), strategy)
    assert set(actual) == set(expected) and not program.facts.fallbacks
    for path, value in expected.items():
        if path.startswith("params."):
            testing.assert_close(actual[path], value, name=path, rtol=1e-11)


def test_slots_are_sharded_like_their_parameter():
    """A square of a dim is sharded once, along the axes of that dim."""
    program = mpar.compile_step(models.from_config(CONFIG), SOAP(1e-3), mpar.Mesh(fsdp=2, tp=2), "zero3_tp", (4, 16))
    leaves = {
        leaf.path.removesuffix(".layers.0.attention.q_DNH"): leaf
        for leaf in program.state_in
        if leaf.path.endswith("0.attention.q_DNH")
    }
    assert {name: leaf.shape for name, leaf in leaves.items()} == {
        "params": (32, 4, 8),
        **dict.fromkeys(("opt.m", "opt.v"), (32, 4, 8)),
        **dict.fromkeys(("opt.left", "opt.left_basis"), (32, 32)),
        **dict.fromkeys(("opt.right", "opt.right_basis"), (4, 8, 4, 8)),
    }
    assert leaves["opt.left"].spec == mpar.P("fsdp", None) and leaves["opt.right"].spec == mpar.P("tp", None, None, None)


@dataclass(frozen=True)
class Wrong(Lion):
    """Its slot has a dim that parameters do not have."""

    slots: ClassVar[tuple[str, ...]] = ("m",)

    def slot_dims(self, slot, ndim):
        return (ndim,)


def test_what_is_refused():
    """Impossible hyperparameters, and dims of a slot that the parameter does not have, when a step is compiled and in Python."""
    with pytest.raises(ConfigError) as caught:
        SOAP(-0.1, (1.0, 0.5), -1.0, precondition_frequency=0)
    for part in ("lr must not", "betas must be", "eps must", "precondition_frequency must"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"slot 'm' is \(2,\), which are not dims of a parameter with 2"):
        mpar.compile_step(models.from_config(CONFIG), Wrong(0.1), mpar.Mesh(), "ddp", (4, 16))
    with pytest.raises(ShapeError, match=r"left up_DF has shape \(6, 9\), its rule says \(6, 6\)"):
        optimizer, params = SOAP(0.1), make_params()
        state = optimizer.init(params, axes=AXES)
        state.slots["left"] = {**state.slots["left"], "up_DF": params["up_DF"]}
        optimizer.update(params, state, params, axes=AXES)
