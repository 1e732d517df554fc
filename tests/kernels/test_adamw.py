"""AdamW's kernel against float64: tensors of any size at once, bias corrections, skipped steps, copies, tables that stay."""

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import _adamw, implementation
from mpar.kernels._catalogue import CATALOGUE
from mpar.kernels._launch import recording

UPDATE = implementation("adamw_many", "triton")
HYPER = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((3, 5), (64,), (2048,), (1,), (0, 4), (2, 2049), (4096,))


def reference(param, grad, m, v, lr, step, scale, *, beta1, beta2, eps, weight_decay):
    """Loshchilov & Hutter's algorithm 2 in float64."""
    param, grad, m, v = (x.double() for x in (param, grad, m, v))
    grad = grad * scale
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    return param - lr * update - lr * weight_decay * param, m, v


def make_state(make, shapes, grad_dtypes=(torch.float32,)):
    """Params, grads, ms and vs of these shapes, gradients of the given dtypes in turn."""
    params, ms = ([make(shape) for shape in shapes] for _ in range(2))
    vs = [make(shape).square() for shape in shapes]
    return params, [make(shape, grad_dtypes[i % len(grad_dtypes)]) for i, shape in enumerate(shapes)], ms, vs


def scalars(device, lr=0.01, step=3, scale=0.3, dtype=torch.float64):
    return [torch.tensor(value, dtype=dtype, device=device) for value in (lr, step, scale)]


def changes(after, before):
    """What an update did, in float64: parameters hardly change, and all of the change is to be right."""
    return torch.cat([(a.double() - b.double()).flatten() for a, b in zip(after, before, strict=True)])


@pytest.mark.parametrize("grad_dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)], ids=str)
def test_matches_float64(grad_dtypes, make_tensor, device):
    """Three steps over tensors of odd and even sizes, empty and larger than a block, with gradients of one dtype or two."""
    params, grads, ms, vs = make_state(make_tensor, SHAPES, grad_dtypes)
    expected = list(zip(params, ms, vs, strict=True))
    first = [p.clone() for p in params]
    for step in (1, 2, 3):
        new = [reference(p, g, m, v, 0.01, step, 0.3, **HYPER) for (p, m, v), g in zip(expected, grads, strict=True)]
        out = UPDATE(params, grads, ms, vs, *scalars(device, step=step), None, [], **HYPER)
        assert all(a is b for group, given in zip(out, (params, ms, vs), strict=False) for a, b in zip(group, given, strict=True))
        expected = new
    for i, group in enumerate((params, ms, vs)):
        for actual, values in zip(group, expected, strict=True):
            testing.assert_close(actual, values[i], name=("param", "m", "v")[i])
    testing.assert_close(changes(params, first), changes([e[0] for e in expected], first), name="change", rtol=1e-4)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bias_correction(step, dtype, make_tensor, device):
    """From moments of 0 the first step has length lr; beta2 near 1 and a million steps lose no digits."""
    hyper = HYPER | {"beta2": 0.9999, "weight_decay": 0.0}
    params, grads, ms, vs = make_state(make_tensor, ((300,),))
    params[0].zero_()
    if step == 1:
        ms[0].zero_(), vs[0].zero_()
    expected = reference(params[0], grads[0], ms[0], vs[0], 0.01, step, 1.0, **hyper)[0]
    UPDATE(params, grads, ms, vs, *scalars(device, step=step, scale=1.0, dtype=dtype), None, [], **hyper)
    testing.assert_close(params[0], expected, rtol=1e-6)


def test_integer_steps_and_beta_of_zero(make_tensor, device):
    """The step may be counted in int64; without momentum the update is the gradient's own."""
    hyper = HYPER | {"beta1": 0.0}
    params, grads, ms, vs = make_state(make_tensor, ((40,),))
    expected = reference(params[0], grads[0], ms[0], vs[0], 0.01, 4, 0.3, **hyper)
    lr, _, scale = scalars(device)
    UPDATE(params, grads, ms, vs, lr, torch.tensor(4, device=device), scale, None, [], **hyper)
    for actual, value in zip((params[0], ms[0], vs[0]), expected, strict=True):
        testing.assert_close(actual, value)


@pytest.mark.parametrize("skips", [False, True])
def test_skip(skips, make_tensor, device):
    """A true `skip` leaves every bit, even of a gradient that is not a number; a false one changes nothing of the update."""
    params, grads, ms, vs = make_state(make_tensor, SHAPES)
    if skips:
        grads[0].fill_(torch.nan)
    expected = [[x.clone() for x in group] for group in (params, ms, vs)]
    if not skips:
        UPDATE(expected[0], grads, *expected[1:], *scalars(device), None, [], **HYPER)
    UPDATE(params, grads, ms, vs, *scalars(device), torch.tensor(skips, device=device), [], **HYPER)
    for group, values in zip((params, ms, vs), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, values, strict=True))


@pytest.mark.parametrize("skips", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copies_are_the_new_parameters(dtype, skips, make_tensor, device):
    """Copies get the bits of the rounded parameters, also where the step is skipped."""
    params, grads, ms, vs = make_state(make_tensor, SHAPES, (torch.bfloat16,))
    copies = [torch.full(p.shape, torch.nan, dtype=dtype, device=device) for p in params]
    skip = None if skips is None else torch.tensor(skips, device=device)
    *_, out = UPDATE(params, grads, ms, vs, *scalars(device), skip, copies, **HYPER)
    assert all(a is b for a, b in zip(out, copies, strict=True))
    assert all(torch.equal(copy, p.to(dtype)) for copy, p in zip(copies, params, strict=True))


def test_unaligned_and_strided_tensors(make_tensor, device):
    """Views at odd addresses and transposed gradients."""
    base = [make_tensor((65,)) for _ in range(4)]
    base[3].square_()
    params, grads, ms, vs = ([x[1:].view(8, 8)] for x in base)
    grads = [grads[0].T]
    expected = reference(params[0], grads[0], ms[0], vs[0], 0.01, 3, 0.3, **HYPER)
    UPDATE(params, grads, ms, vs, *scalars(device), None, [], **HYPER)
    for actual, value in zip((params[0], ms[0], vs[0]), expected, strict=True):
        testing.assert_close(actual, value)


def test_nothing_to_update(device):
    """Empty lists and lists of empty tensors."""
    assert UPDATE([], [], [], [], *scalars(device), None, [], **HYPER) == ([], [], [], [])
    empty = [torch.empty(0, 3, device=device)]
    UPDATE(empty, empty, empty, empty, *scalars(device), None, [], **HYPER)


def test_tables_are_kept(make_tensor, device):
    """The second step with the same tensors copies nothing to the device; other tensors get tables of their own."""
    state, other = make_state(make_tensor, ((64,), (32,))), make_state(make_tensor, ((64,), (32,)))
    UPDATE(*state, *scalars(device), None, [], **HYPER)
    misses = _adamw._addresses.cache_info().misses
    UPDATE(*state, *scalars(device), None, [], **HYPER)
    assert _adamw._addresses.cache_info().misses == misses
    UPDATE(*other, *scalars(device), None, [], **HYPER)
    assert _adamw._addresses.cache_info().misses == misses + 1


@pytest.mark.parametrize("copied", [False, True])
def test_addresses_are_written_by_kernels_in_a_recording(copied, make_tensor, device, monkeypatch):
    """Where nothing may be copied from the host, the update has the same bits."""
    state = make_state(make_tensor, SHAPES)
    copies = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES] if copied else []
    again = [[x.clone() for x in column] for column in (*state, copies)]
    UPDATE(*state, *scalars(device), None, copies, **HYPER)
    misses = _adamw._addresses.cache_info().misses
    monkeypatch.setattr(_adamw, "capturing", lambda x: True)
    UPDATE(*again[:4], *scalars(device), None, again[4], **HYPER)
    assert _adamw._addresses.cache_info().misses == misses
    for column, other in zip((*state, copies), again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(column, other, strict=True))


def test_programs_have_every_block_once():
    """The table of programs: each block of each tensor, in order."""
    cpu = torch.device("cpu")
    table, chunks = _adamw._addresses(cpu, ((16, 32), (48, 64), (0, 1), (2, 3)), (5, 9)), _adamw._chunks(cpu, (5, 9), 4)
    assert table.tolist() == [[16, 48, 0, 2, 0, 5], [32, 64, 1, 3, 0, 9]]
    assert chunks.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]


def test_one_launch_for_a_list():
    """Tensors without data are recorded as one launch, odd ones as a second."""
    make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    even, odd = make(4096, 32), make(5)
    with recording("sm_90") as record:
        for params in ([even, even, even], [even, odd, even]):
            UPDATE(params, params, params, params, make(), make(), make(), make(dtype=torch.bool), [], **HYPER)
    programs = [len(launch.args[1]) for launch in record.launches]
    blocks = even.numel() // record.launches[0].tuning.blocks["BLOCK"]
    assert programs == [3 * blocks, 2 * blocks, 1]


def test_other_dtypes_are_refused(make_tensor, device):
    """bfloat16 parameters are the reference's business; the reason says so."""
    params, grads, ms, vs = make_state(make_tensor, ((4,),))
    narrow = [p.bfloat16() for p in params]
    lr, step, scale = scalars(device)
    supports = CATALOGUE["adamw_many"][0].supports
    assert supports("sm_90", params, narrow, ms, vs, lr, step, scale, None, [], **HYPER) is None
    assert "params, ms, vs: torch.bfloat16" in supports("sm_90", narrow, grads, ms, vs, lr, step, scale, None, [], **HYPER)
    with pytest.raises(KernelError, match=r"torch\.bfloat16"):
        UPDATE(narrow, grads, ms, vs, lr, step, scale, None, [], **HYPER)
