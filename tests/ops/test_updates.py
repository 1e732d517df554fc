"""Optimizer updates against torch.optim in float64, over several steps."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DifferentiationError, DtypeError, ShapeError

HYPER = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((3, 5), (70,), (2, 1, 9))


def _scalars(step):
    return [torch.tensor(value, dtype=torch.float64) for value in (0.01, step, 0.3)]


def _train(make_tensor, dtype, make_optimizer, update, slot_keys):
    """Three steps of `update(params, grads, slots, step) -> (params, slots)` and of torch's optimizer in float64."""
    params = [make_tensor(shape, dtype) for shape in SHAPES]
    reference = [p.double().clone().requires_grad_() for p in params]
    optimizer = make_optimizer(reference)
    slots = [[torch.zeros_like(p) for p in params] for _ in slot_keys]
    for step in (1, 2, 3):
        grads = [make_tensor(shape, dtype) for shape in SHAPES]
        for p, g in zip(reference, grads, strict=True):
            p.grad = g.double() * 0.3
        optimizer.step()
        params, slots = update(params, grads, slots, step)
    for p, expected in zip(params, reference, strict=True):
        assert p.dtype == dtype
        testing.assert_close(p, expected, name="param")
    for slot, key in zip(slots, slot_keys, strict=True):  # AdamW's parameters hardly depend on a gradient's scale; its slots do
        for value, p in zip(slot, reference, strict=True):
            testing.assert_close(value, optimizer.state[p][key], name=key)


def _adamw_each(params, grads, slots, step):
    out = [ops.adamw(*operands, *_scalars(step), **HYPER) for operands in zip(params, grads, *slots, strict=True)]
    params, *slots = (list(column) for column in zip(*out, strict=True))
    return params, slots


def _adamw_many(params, grads, slots, step):
    params, *slots = ops.adamw_many(params, grads, *slots, *_scalars(step), **HYPER)
    return params, slots


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update", [_adamw_each, _adamw_many])
def test_adamw_matches_torch(update, dtype, make_tensor):
    """Both forms follow torch.optim.AdamW, with the gradient scaled first."""
    make = lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)  # noqa: E731
    _train(make_tensor, dtype, make, update, ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_sgd_matches_torch(many, nesterov, dtype, make_tensor):
    """Both forms follow torch.optim.SGD with momentum, coupled weight decay and Nesterov's form."""
    hyper = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}

    def update(params, grads, slots, step):
        lr, _, scale = _scalars(step)
        if many:
            params, ms = ops.sgd_many(params, grads, slots[0], lr, scale, **hyper)
            return params, [ms]
        out = [ops.sgd(*operands, lr, scale, **hyper) for operands in zip(params, grads, slots[0], strict=True)]
        return [p for p, _ in out], [[m for _, m in out]]

    _train(make_tensor, dtype, lambda ps: torch.optim.SGD(ps, lr=0.01, **hyper), update, ("momentum_buffer",))


@pytest.mark.parametrize("update", [_adamw_each, _adamw_many])
def test_what_is_overwritten(update, make_tensor):
    """adamw changes no operand; adamw_many returns the storage of its operands."""
    params, grads, ms, vs = ([make_tensor((3, 4))] for _ in range(4))
    before = [x[0].clone() for x in (params, grads, ms)]
    new_params, (new_ms, _) = update(params, grads, [ms, [vs[0].abs()]], 1)
    if update is _adamw_many:
        assert new_params[0].data_ptr() == params[0].data_ptr() and new_ms[0].data_ptr() == ms[0].data_ptr()
    else:
        assert all(torch.equal(x[0], old) for x, old in zip((params, grads, ms), before, strict=True))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_adamw_skips(many, dtype, skips, make_tensor):
    """A true `skip` leaves every bit, whatever the gradient; a false one gives the bits of no `skip`."""
    params, grads, ms = ([make_tensor((3, 4), dtype)] for _ in range(3))
    vs = [make_tensor((3, 4), dtype).square()]
    if skips:
        grads[0].fill_(torch.inf)
    skip, expected = torch.tensor(skips), [x[0].clone() for x in (params, ms, vs)]
    if not skips:
        expected = ops.adamw(params[0], grads[0], ms[0], vs[0], *_scalars(3), **HYPER)
        if many:
            lists = [[x[0].clone()] for x in (params, grads, ms, vs)]
            expected = [x[0] for x in ops.adamw_many(*lists, *_scalars(3), **HYPER)]
    if many:
        out = [x[0] for x in ops.adamw_many(params, grads, ms, vs, *_scalars(3), skip=skip, **HYPER)]
    else:
        out = ops.adamw(params[0], grads[0], ms[0], vs[0], *_scalars(3), skip=skip, **HYPER)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize("skip", [None, False, True])
def test_adamw_writes_copies(skip, make_tensor):
    """Copies are the new parameters, rounded."""
    params, grads, ms, vs = ([make_tensor(shape).abs() for shape in SHAPES] for _ in range(4))
    copies = [torch.zeros(p.shape, dtype=torch.bfloat16) for p in params]
    skip = None if skip is None else torch.tensor(skip)
    new, *_ = ops.adamw_many(params, grads, ms, vs, *_scalars(1), skip=skip, copies=copies, **HYPER)
    assert all(torch.equal(copy, p.bfloat16()) for copy, p in zip(copies, new, strict=True))
    with pytest.raises(ShapeError, match="'copies': 1"):
        ops.adamw_many(params, grads, ms, vs, *_scalars(1), copies=copies[:1], **HYPER)
    with pytest.raises(DtypeError, match="skip is torch\\.float32"):
        ops.adamw_many(params, grads, ms, vs, *_scalars(1), skip=torch.ones(()), **HYPER)


def test_sum_squares_of_many_small_numbers():
    """Four million float32 numbers are added with an error of float32's last digit."""
    x = torch.linspace(0.5, 1.5, (1 << 22) + 17)
    testing.assert_close(ops.sum_squares(x), x.double().square().sum(), rtol=2e-7)


def test_wrong_operands_are_refused(make_tensor):
    """All offenders are listed: shapes, counts, dtypes, scalars that are not, storage that cannot be overwritten."""
    x, lr = make_tensor((2, 3)), _scalars(1)
    with pytest.raises(ShapeError, match=r"(?s)grad.*lr is"):
        ops.adamw(x, make_tensor((3,)), x, x, torch.ones(1), *lr[1:], **HYPER)
    with pytest.raises(ShapeError, match=r"2 tensors in params, but .'grads': 1"):
        ops.adamw_many([x, x], [x], [x, x], [x, x], *lr, **HYPER)
    with pytest.raises(DtypeError, match="m\\[0\\] is torch\\.int64"):
        ops.sgd(x, x, x.long(), lr[0], lr[2], momentum=0.9)
    with pytest.raises(ShapeError, match="not contiguous"):
        ops.sgd_many([x.T], [x.T], [x.T], lr[0], lr[2], momentum=0.9)
    leaf = make_tensor((2, 3), requires_grad=True)
    with pytest.raises(DifferentiationError, match="cannot differentiate sgd_many"):
        ops.sgd_many([leaf], [x], [x], lr[0], lr[2], momentum=0.9)
    with pytest.raises(DtypeError, match="floating"):
        ops.sum_squares(torch.arange(3))
