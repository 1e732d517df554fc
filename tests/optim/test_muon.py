"""Lion and Muon against the formulas of their papers and torch.optim.Muon, alone and on meshes."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.optim import _muon

import mpar
from mpar import models, ops, testing, tree
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.optim import AdamW, Lion, Muon, MuonMatrix
from mpar.optimizer import leaf_rule

STEPS = 100
AXES = {"up_DF": ("embed", "mlp"), "down_FD": ("mlp", "embed"), "square_DD": ("embed", "embed"), "norm_D": ("embed",)}
SHAPES = {"up_DF": (6, 9), "down_FD": (9, 6), "square_DD": (6, 6), "norm_D": (6,)}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


MESHES = [({"dp": 2}, "ddp"), ({"fsdp": 4}, "zero3"), ({"fsdp": 2, "tp": 2}, "zero3_tp"), ({"pp": 2, "dp": 2}, "zero1")]


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(param, step):
    """A gradient that depends on the parameter, so that errors would grow from step to step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(param.shape, generator=generator, dtype=torch.float64) + 0.3 * param.sin()


def run_ours(optimizer):
    params = make_params()
    state = optimizer.init(params, axes=AXES)
    for step in range(1, STEPS + 1):
        grads = {name: gradient(param, step) for name, param in params.items()}
        params, state = optimizer.update(grads, state, params, axes=AXES)
    return params, state


def test_lion_follows_the_paper():
    """100 steps equal algorithm 2 of the paper, written out."""
    ours, _ = run_ours(Lion(0.01, weight_decay=0.3))
    for name, param in make_params().items():
        m = torch.zeros_like(param)
        for step in range(1, STEPS + 1):
            g = gradient(param, step)
            c = 0.9 * m + 0.1 * g
            param = param - 0.01 * (c.sign() + (0.3 if param.ndim > 1 else 0.0) * param)
            m = 0.99 * m + 0.01 * g
        testing.assert_close(ours[name], param, name=name, rtol=1e-9)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch(narrow, adjust_lr, nesterov, monkeypatch):
    """100 steps of matrices equal torch.optim.Muon on the transposed weights, those of a norm torch.optim.AdamW.

    Where Newton-Schulz is not narrow, torch's own source runs with its cast to bfloat16 taken out.
    """
    if not narrow:
        source = inspect.getsource(_muon._zeropower_via_newtonschulz).replace("grad.bfloat16()", "grad.clone()")
        scope = dict(vars(_muon))
        exec(source, scope)
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", scope["_zeropower_via_newtonschulz"])
    ours, state = run_ours(Muon(0.01, adjust_lr=adjust_lr, nesterov=nesterov, narrow=narrow))
    for name, start in make_params().items():
        is_matrix = start.ndim == 2
        param = torch.nn.Parameter(start.T.contiguous() if is_matrix else start)
        if is_matrix:
            theirs = torch.optim.Muon([param], lr=0.01, adjust_lr_fn=adjust_lr, nesterov=nesterov)
        else:
            theirs = torch.optim.AdamW([param], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(1, STEPS + 1):
            value = param.detach().T if is_matrix else param.detach()
            grad = gradient(value, step)
            param.grad = grad.T.contiguous() if is_matrix else grad
            theirs.step()
        testing.assert_close(ours[name], param.detach().T if is_matrix else param.detach(), name=name, rtol=1e-9)
        kept = {slot for slot in state.slots if state.slots[slot][name].numel()}
        assert kept == ({"momentum"} if is_matrix else {"m", "v"})


@pytest.mark.parametrize(
    ("path", "axes", "sides"),
    [
        ("layers.0.mlp.up_DF", ("embed", "mlp"), (1, 1)),
        ("layers.0.attention.q_DNH", ("embed", "heads", "head"), (1, 2)),
        ("layers.0.attention.o_NHD", ("heads", "head", "embed"), (2, 1)),
        ("layers.0.attention.kv_b_CNH", (None, "heads", "head"), (1, 2)),
        ("layers.0.mamba.b_DGK", ("embed", "kv_heads", None), (1, 2)),
        ("layers.0.mamba.dt_DN", ("embed", "heads"), (1, 1)),
        ("layers.0.mlp.gate_EDF", ("expert", "embed", "expert_mlp"), (1, 1)),
        ("layers.0.mamba.conv_x_NHW", ("heads", "head", None), None),
        ("layers.0.attention.q_bias_NH", ("heads", "head"), None),
        ("layers.0.attn_norm_D", ("embed",), None),
        ("head.head_DV", ("embed", "vocab"), None),
        ("table_VD", ("vocab", "embed"), None),
        ("embed.positions_SD", (None, "embed"), None),
    ],
)
def test_which_parameters_are_matrices(path, axes, sides):
    """The sides of hidden matrices, by path and axes; the rest takes AdamW with the same settings."""
    rule = leaf_rule(Muon(0.1, weight_decay=0.2), path, axes)
    if sides is None:
        assert rule == AdamW(0.1, weight_decay=0.2)
    else:
        assert isinstance(rule, MuonMatrix) and (rule.rows, rule.columns) == sides


def test_merged_dims_and_experts(make_tensor):
    """Dims of heads are merged, and experts are matrices each: the same as one matrix at a time, of singular values near 1."""
    x_EDNH = make_tensor((3, 8, 2, 5), torch.float64)
    y_EDNH = ops.newton_schulz(x_EDNH, columns=2, narrow=False)
    for x_DNH, y_DNH in zip(x_EDNH, y_EDNH, strict=True):
        expected = ops.newton_schulz(x_DNH.flatten(1), narrow=False)
        testing.assert_close(y_DNH.flatten(1), expected, name="y", rtol=1e-12)
        assert all(0.5 < value < 1.5 for value in torch.linalg.svdvals(expected))


def test_sharding_of_newton_schulz(make_tensor):
    """The rule holds where matrices are on different ranks, and where the dims of a matrix are sharded."""
    x = make_tensor((4, 8, 4), torch.float64)
    params = {"rows": 1, "columns": 1, "num_rounds": 5, "narrow": False}
    assert mpar.check(ops.PRIMITIVES["newton_schulz"], (x,), params) == ("leading0", "r0", "c0")


def test_what_newton_schulz_refuses(make_tensor):
    """Too few dims and integers."""
    with pytest.raises(ShapeError, match=r"rows=1 and columns=2 must be"):
        ops.newton_schulz(make_tensor((2, 3)), columns=2)
    with pytest.raises(DtypeError, match="floating"):
        ops.newton_schulz(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", [Lion(1e-3), Muon(1e-2, narrow=False), Muon(1e-2)], ids=repr)
@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_meshes_agree(optimizer, mesh, strategy):
    """Three steps in float64 on a mesh equal those on one rank, parameters and slots alike."""
    program, actual, expected = on_a_mesh(optimizer, mesh, strategy, 3)
    assert set(actual) == set(expected) and not program.facts.fallbacks
    for path, value in expected.items():
        testing.assert_close(actual[path], value, name=path, rtol=1e-11)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_meshes_agree_for_100_steps(mesh, strategy):
    """The parameters after 100 steps of Muon in float64 on a mesh are those on one rank."""
    _, actual, expected = on_a_mesh(Muon(1e-3, narrow=False), mesh, strategy, STEPS)
    for path, value in expected.items():
        if path.startswith("params."):
            testing.assert_close(actual[path], value, name=path, rtol=1e-11)


def on_a_mesh(optimizer, mesh, strategy, steps):
    """`(program, state on the mesh, state on one rank)` after some steps."""
    model = models.from_config(CONFIG, models.ModelOptions(dtype=torch.float64))
    params = model.init(seed=0)
    tokens = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def train(mesh, strategy, **options):
        program = mpar.compile_step(model, optimizer, mesh, strategy, (8, 16), num_microbatches=2)
        state = program.init_state(tree.map_leaves(torch.clone, params))
        for _ in range(steps):
            state, _ = program.simulate(state, batch)
        return program, state.leaves

    _, expected = train(mpar.Mesh(dp=1), "ddp")
    program, actual = train(mpar.Mesh(**mesh), strategy)
    return program, actual, expected


def test_slots_of_a_program():
    """A matrix keeps one tensor, others two; a sharded matrix is gathered once, not once for each round."""
    model = models.from_config(CONFIG)
    program = mpar.compile_step(model, Muon(1e-2), mpar.Mesh(fsdp=2), "zero3", (4, 16))
    names = {leaf.path for leaf in program.state_in if leaf.path.startswith("opt.")}
    assert {n for n in names if n.endswith("layers.0.attention.q_DNH")} == {"opt.momentum.layers.0.attention.q_DNH"}
    assert {n.split(".")[1] for n in names if n.endswith(("norm_D", "table_VD", "head_DV"))} == {"m", "v"}
    (update,) = [i for i in program.part(rank=0).instructions if i.op == "update" and i.segment == "layers.0"]
    assert [use.op for use in program.kinds[update.kind].collectives] == ["all_gather"] * 7


def test_a_rule_with_a_slot_that_the_optimizer_lacks():
    """It is refused when the step is compiled, and the message says where to add it."""
    wrong = type("Wrong", (Lion,), {"leaf_rule": lambda self, path, axes: SimpleNamespace(slots=("extra",), update_leaf=print)})
    with pytest.raises(ConfigError, match=r"has the slots \('extra',\); the optimizer has \('m',\).\nThe slots of a rule"):
        mpar.compile_step(models.from_config(CONFIG), wrong(0.1), mpar.Mesh(), "ddp", (4, 16))


def test_what_is_refused():
    """Impossible hyperparameters come in one message."""
    with pytest.raises(ConfigError) as caught:
        Muon(-0.1, momentum=1.0, num_rounds=0, adjust_lr="none", betas=(1.0, 0.5), eps=-1.0)
    for part in ("lr must not", "momentum must be", "num_rounds must", "adjust_lr must", "betas must", "eps must"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="betas must be in"):
        Lion(0.1, betas=(0.9, 1.0))


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (lambda param, slots: (param.double(), slots), "new param is float64 (128, 32), and was float32 (128, 32)"),
        (lambda param, slots: (param.sum(), slots), "new param is float32 (), and was"),
        (lambda param, slots: (param, ()), "0 slots; the parameter has 1"),
        (lambda param, slots: (param, (slots[0].bfloat16(),)), "new slot 0 is bfloat16"),
    ],
    ids=["dtype", "shape", "number of slots", "dtype of a slot"],
)
def test_wrong_results_of_an_update(result, part):
    """A rule of one's own that returns something else is refused when the step is compiled, with what it returned."""
    members = {"update_leaf": lambda self, param, grad, slots, lr, step, scale, *, decays: result(param, slots)}
    with pytest.raises(ConfigError) as caught:
        mpar.compile_step(models.from_config(CONFIG), type("Wrong", (Lion,), members)(0.1), mpar.Mesh(), "ddp", (4, 16))
    assert part in str(caught.value) and len(str(caught.value).splitlines()) <= 25
