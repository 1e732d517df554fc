import pytest
import torch

from mpar import tree
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.optim import SGD, AdamW, Cosine, OptState, clip_factor, global_norm
from mpar.testing import assert_close

STEPS = 20
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@tree.struct
class Layer:
    up_DF: torch.Tensor
    gain_D: torch.Tensor
    q_bias_NH: torch.Tensor


def make_params(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "embed": randn(7, 5),
        "layers": (Layer(randn(5, 9), randn(5), randn(2, 3)), Layer(randn(5, 9), randn(5), randn(2, 3))),
    }


def make_grads(params, step):
    """Gradients of very different size from step to step, so that some are clipped and some are not."""
    generator = torch.Generator().manual_seed(100 + step)
    factor = 3.0 if step % 3 == 0 else 0.05

    def randn(leaf):
        return (factor * torch.randn(leaf.shape, generator=generator, dtype=torch.float64)).to(leaf.dtype)

    return tree.map_leaves(randn, params)


def run_ours(optimizer, params):
    """20 updates with clipping; gives the parameters, the state and the norms before clipping."""
    state, norms = optimizer.init(params), []
    for step in range(1, STEPS + 1):
        grads = make_grads(params, step)
        norm = global_norm(grads)
        norms.append(norm)
        scale = 1.0 if optimizer.clip_norm is None else clip_factor(norm, optimizer.clip_norm)
        params, state = optimizer.update(grads, state, params, scale=scale)
    return params, state, norms


def run_torch(make, params, clip_norm, rate=lambda step: 0.01, decays=lambda path: True, weight_decay=0.0):
    """The same with torch.optim and torch.nn.utils.clip_grad_norm_; `make(groups)` gives the optimizer."""
    named = [(path, torch.nn.Parameter(leaf.clone())) for path, leaf in tree.leaves_with_path(params)]
    groups = [{"params": [p], "weight_decay": weight_decay if decays(path) else 0.0} for path, p in named]
    optimizer, norms = make(groups), []
    for step in range(1, STEPS + 1):
        for (_, param), grad in zip(named, tree.leaves(make_grads(params, step)), strict=True):
            param.grad = grad.clone()
        bound = float("inf") if clip_norm is None else clip_norm
        norms.append(torch.nn.utils.clip_grad_norm_([param for _, param in named], bound))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return [param.detach() for _, param in named], norms, optimizer.state


def assert_same(ours, theirs, dtype):
    for (path, actual), expected in zip(tree.leaves_with_path(ours), theirs, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, name=path, rtol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(dtype, clip_norm, weight_decay):
    """20 clipped steps with a schedule: parameters, moments and norms equal torch's."""
    schedule = Cosine(lr=0.02, total_steps=25, warmup_steps=4, min_ratio=0.1)
    ours = AdamW(schedule, betas=(0.8, 0.97), eps=1e-6, weight_decay=weight_decay, decay="all", clip_norm=clip_norm)
    params, state, norms = run_ours(ours, make_params(dtype))
    expected, expected_norms, slots = run_torch(
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.97), eps=1e-6),
        make_params(dtype),
        clip_norm,
        rate=schedule,
        weight_decay=weight_decay,
    )
    assert_same(params, expected, dtype)
    assert_same(state.slots["m"], [slot["exp_avg"] for slot in slots.values()], dtype)
    assert_same(state.slots["v"], [slot["exp_avg_sq"] for slot in slots.values()], dtype)
    assert_close(torch.stack(norms), torch.stack(expected_norms), name="norms", rtol=BOUNDS[dtype])
    assert state.step.dtype == torch.int64 and state.step.shape == () and int(state.step) == STEPS
    assert any(norm > 1 for norm in norms) and any(norm < 1 for norm in norms)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd(dtype, momentum, nesterov, weight_decay):
    """20 clipped steps equal torch's, with and without momentum; the momentum buffers as well."""
    ours = SGD(0.01, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, decay="all", clip_norm=1.0)
    params, state, _ = run_ours(ours, make_params(dtype))
    expected, _, slots = run_torch(
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=momentum, nesterov=nesterov),
        make_params(dtype),
        1.0,
        weight_decay=weight_decay,
    )
    assert_same(params, expected, dtype)
    assert list(state.slots) == list(ours.slots) == (["momentum"] if momentum else [])
    if momentum:
        assert_same(state.slots["momentum"], [slot["momentum_buffer"] for slot in slots.values()], dtype)


@pytest.mark.parametrize("optimizer", [AdamW(0.01, weight_decay=0.3), SGD(0.01, weight_decay=0.3)], ids=repr)
def test_norms_and_biases_do_not_decay(optimizer):
    """By default 1-D parameters and biases of any rank are left out of weight decay, as with torch's parameter groups."""
    params, _, _ = run_ours(optimizer, make_params(torch.float64))
    kinds = {
        AdamW: lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        SGD: lambda groups: torch.optim.SGD(groups, lr=0.01),
    }
    expected, _, _ = run_torch(
        kinds[type(optimizer)],
        make_params(torch.float64),
        1.0,
        decays=lambda path: path in ("embed", "layers.0.up_DF", "layers.1.up_DF"),
        weight_decay=0.3,
    )
    assert_same(params, expected, torch.float64)


def test_decay_mask_table():
    """The mask by path and rank, from tensors and from logical axes alike; "all" takes every parameter."""
    by_rank, everything = AdamW(0.1), AdamW(0.1, decay="all")
    table = {"head.table_VD": ("vocab", "embed"), "head.gain_D": ("embed",), "layers.3.q_bias_NH": ("heads", "head"), "t": ()}
    assert {path: by_rank.decays(path, axes) for path, axes in table.items()} == {
        "head.table_VD": True,
        "head.gain_D": False,
        "layers.3.q_bias_NH": False,
        "t": False,
    }
    assert by_rank.decays("debiased.up_DF", torch.empty(2, 3, device="meta"))
    assert all(everything.decays(path, axes) for path, axes in table.items())


@pytest.mark.parametrize("optimizer", [AdamW(0.01), SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.1)], ids=repr)
def test_update_is_pure(optimizer):
    """Nothing that is passed in changes, and the same call gives the same bits again."""
    params = make_params(torch.float32)
    grads, (params, state) = make_grads(params, 3), optimizer.update(make_grads(params, 1), optimizer.init(params), params)
    operands = (grads, state, params)
    before = tree.map_leaves(torch.clone, operands)
    first = optimizer.update(*operands, scale=0.5)
    second = optimizer.update(*operands, scale=0.5)
    for actual, expected in ((operands, before), (second, first)):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True))


@pytest.mark.parametrize("optimizer", [AdamW(0.01, weight_decay=0.2), SGD(0.01, momentum=0.9, weight_decay=0.2)], ids=repr)
def test_shards_update_to_shards(optimizer):
    """`update_leaf` on two halves gives the halves of `update` on the whole, bit by bit."""
    params = {"w": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}
    state = optimizer.init(params)
    params, state = optimizer.update(make_grads(params, 1), state, params)
    grads = make_grads(params, 2)
    whole, whole_state = optimizer.update(grads, state, params, scale=0.3)
    scalars = (torch.tensor(0.01, dtype=torch.float64), torch.tensor(2), torch.tensor(0.3, dtype=torch.float64))
    for part in (slice(0, 3), slice(3, 6)):
        slots = tuple(state.slots[slot]["w"][part] for slot in optimizer.slots)
        param, slots = optimizer.update_leaf(params["w"][part], grads["w"][part], slots, *scalars, decays=True)
        assert torch.equal(param, whole["w"][part])
        assert all(torch.equal(s, whole_state.slots[name]["w"][part]) for s, name in zip(slots, optimizer.slots, strict=True))


@pytest.mark.parametrize("optimizer", [AdamW(0.01), SGD(0.01, momentum=0.9), SGD(10.0)], ids=repr)
def test_gradients_of_another_dtype(optimizer):
    """bfloat16 gradients update float32 parameters as their float32 values would; the parameter keeps its dtype."""
    params = make_params(torch.float32)
    narrow = tree.map_leaves(lambda g: g.bfloat16(), make_grads(params, 1))
    actual, _ = optimizer.update(narrow, optimizer.init(params), params, scale=0.3)
    expected, _ = optimizer.update(tree.map_leaves(lambda g: g.float(), narrow), optimizer.init(params), params, scale=0.3)
    assert_same(actual, tree.leaves(expected), torch.float32)


def test_state_has_the_shape_of_the_parameters():
    """Slots are zeros with the tree, shapes and dtypes of the parameters; meta parameters have a meta state."""
    params = make_params(torch.float32)
    state = AdamW(0.1).init(params)
    assert isinstance(state, OptState) and list(state.slots) == ["m", "v"]
    for slot in state.slots.values():
        assert tree.paths(slot) == tree.paths(params)
        assert all(torch.equal(a, torch.zeros_like(b)) for a, b in zip(tree.leaves(slot), tree.leaves(params), strict=True))
    storages = {leaf.data_ptr() for leaf in tree.leaves(state.slots)}
    assert len(storages) == len(tree.leaves(state.slots))
    meta = AdamW(0.1).init(tree.map_leaves(lambda leaf: leaf.to("meta"), params))
    assert {leaf.device.type for leaf in tree.leaves(meta)} == {"meta"}


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3], ids=str)
def test_clip_factor(scale):
    """Scaled by the factor, gradients have a norm of at most the bound, and small ones are left exactly alone."""
    grads = tree.map_leaves(lambda g: g * scale, make_grads(make_params(torch.float64), 1))
    norm = torch.cat([g.flatten() for g in tree.leaves(grads)]).norm()
    assert_close(global_norm(grads), norm, name="norm")
    factor = clip_factor(global_norm(grads), 0.5)
    assert_close(factor, torch.tensor(min(1.0, 0.5 / (float(norm) + 1e-6)), dtype=torch.float64), name="factor")
    assert norm * factor <= 0.5
    assert (factor == 1) == bool(norm + 1e-6 <= 0.5)


def test_norm_of_narrow_gradients():
    """The norm of float16 gradients does not overflow: square sums are float32."""
    norm = global_norm({"a": torch.full((4,), 6e4, dtype=torch.float16), "b": torch.zeros(2, dtype=torch.bfloat16)})
    assert norm.dtype == torch.float32
    assert_close(norm, torch.tensor(1.2e5), name="norm", rtol=1e-3)


def test_not_finite_norms_are_visible():
    """An infinite or NaN gradient makes the norm infinite or NaN, which is the caller's to check."""
    assert torch.isinf(global_norm({"a": torch.tensor([1.0, float("inf")])}))
    assert torch.isnan(global_norm({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)}))


@pytest.mark.parametrize("optimizer", [AdamW(0.1), SGD(0.1)], ids=repr)
def test_masters_must_be_wide(optimizer):
    """Parameters in other dtypes are refused, all of them in one error."""
    params = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(2), "c": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(DtypeError) as caught:
        optimizer.init(params)
    assert "a (2, 3) is torch.bfloat16" in str(caught.value) and "c (4,) is torch.int64" in str(caught.value)
    assert "b (2,)" not in str(caught.value)


def test_trees_that_do_not_fit():
    """Missing, additional and mis-shaped leaves of gradients and state come in one error."""
    optimizer, params = AdamW(0.1), {"a": torch.zeros(2), "b": torch.zeros(3)}
    state = optimizer.init({"a": torch.zeros(2), "b": torch.zeros(4)})
    with pytest.raises(ShapeError) as caught:
        optimizer.update({"a": torch.zeros(2), "c": torch.zeros(3)}, state, params)
    for part in ("grads has no b", "grads has c", "m b has shape (4,), its rule says (3,)", "v b has shape (4,)"):
        assert part in str(caught.value)
    with pytest.raises(ShapeError, match="no leaf"):
        global_norm({})


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: AdamW(-0.1, betas=(1.0, -0.5), eps=-1.0), ["[0, 1), not 1.0", "[0, 1), not -0.5", "eps", "lr"]),
        (lambda: AdamW(0.1, weight_decay=float("nan"), clip_norm=0.0), ["weight_decay", "clip_norm must be positive"]),
        (lambda: AdamW(0.1, decay="none"), ["decay must be 'by_rank' or 'all', not 'none'"]),
        (lambda: SGD(0.1, nesterov=True, momentum=0.0), ["nesterov=True needs momentum"]),
        (lambda: SGD(-0.1, momentum=-1.0, weight_decay=-1.0, clip_norm=-1.0), ["lr", "momentum", "weight_decay", "clip_norm"]),
    ],
)
def test_what_is_refused(make, parts):
    """Impossible hyperparameters raise ConfigError with every one of them in the message."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(part in str(caught.value) for part in parts), str(caught.value)
