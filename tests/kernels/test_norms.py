"""Norms, alone and of a sum, against float64: widths of every class, strides, no rows, equal bits."""

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import implementation
from mpar.kernels._catalogue import CATALOGUE
from mpar.kernels._table import classes, tuning

NAMES = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
FORWARD = {name: implementation(name, "triton") for name in NAMES}
BACKWARD = {name: implementation(f"{name}_bwd", "triton") for name in NAMES}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-3


def rms(x, weight=None):
    """Zhang & Sennrich's norm in plain torch."""
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight


def layer(x, weight=None, bias=None):
    """Ba et al.'s norm in plain torch."""
    x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def check(name, x, dy, *weights, residual=None, dtotal=None, rtol=None):
    """`name`'s kernels on these operands and the formula in float64 agree: results, and gradients of all operands."""
    formula = rms if "rms" in name else layer
    sums = (x.double(),) if residual is None else (x.double(), residual.double())
    given = [w for w in weights if w is not None]

    def whole(*operands):
        total = operands[0] if residual is None else operands[0] + operands[1]
        places = iter(operands[len(sums) :])
        return formula(total, *(None if w is None else next(places) for w in weights)), total

    (y, total), pull_back = testing.vjp(whole, *sums, *(w.double() for w in given))
    results = FORWARD[name](x, *(() if residual is None else (residual,)), *weights, eps=EPS)
    read = x
    if residual is not None:
        results, read = results
        testing.assert_close(read, total, name="total", rtol=rtol)
    assert results.dtype == x.dtype and results.is_contiguous()
    testing.assert_close(results, y, name="y", rtol=rtol)
    extra = () if residual is None else (dtotal,)
    dx, *dweights = BACKWARD[name](read, *weights, dy, *extra, eps=EPS)
    expected = pull_back((dy.double(), torch.zeros_like(total) if dtotal is None else dtotal.double()))
    assert dx.dtype == x.dtype and dx.is_contiguous()
    testing.assert_close(dx, expected[0], name="dx", rtol=rtol)
    gradients = iter(expected[len(sums) :])
    for weight, dweight in zip(weights, dweights, strict=True):
        if weight is None:
            assert dweight.shape == (0,)
            continue
        assert dweight.dtype == weight.dtype
        testing.assert_close(dweight, next(gradients), name="dweight", rtol=rtol)


def operands_for(name, shape, dtype, make, weights_dtype=None):
    """Keyword and positional operands of `check`, all of them given."""
    x, dy = make(shape, dtype), make(shape, dtype)
    weights = [make(shape[-1:], weights_dtype or dtype) + 1 for _ in range(1 if "rms" in name else 2)]
    sums = {"residual": make(shape, dtype), "dtotal": make(shape, dtype)} if name.startswith("add") else {}
    return (x, dy, *weights), sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 1000), (7, 128), (3, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_matches_float64(name, shape, dtype, make_tensor):
    """Results and all gradients, for odd widths, one row, and narrow rows that share a program."""
    args, sums = operands_for(name, shape, dtype, make_tensor)
    check(name, *args, **sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 65, 200, 512, 1100, 4096, 4097])
@pytest.mark.parametrize("name", NAMES)
def test_every_width_class(name, width, dtype, make_tensor):
    """Widths in every class of the table."""
    args, sums = operands_for(name, (3, width), dtype, make_tensor)
    check(name, *args, **sums)


@pytest.mark.parametrize("width", [9000, 32768])
@pytest.mark.parametrize("name", NAMES)
def test_wide_rows(name, width, make_tensor):
    """The widest rows that registers hold; their gradients go block by block."""
    (x, _, *weights), sums = operands_for(name, (2, width), torch.bfloat16, make_tensor)
    y = FORWARD[name](x, *([sums["residual"]] if sums else []), *weights, eps=EPS)
    total = x.double() + (sums["residual"].double() if sums else 0)
    testing.assert_close(y[0] if sums else y, (rms if "rms" in name else layer)(total, *(w.double() for w in weights)))


@pytest.mark.parametrize("width", [48, 1500, 8200])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_more_rows_than_programs(name, width, make_tensor, monkeypatch):
    """Programs that walk over several rows add up the gradients of weights over all of them; wide rows block by block."""
    rows = 3 * 32 + 5 if width == 48 else 7
    few = few_programs(2)
    module = "_rms_norm" if "rms" in name else "_layer_norm"
    monkeypatch.setattr(f"mpar.kernels.{module}.tuned", few)
    args, sums = operands_for(name, (rows, width), torch.float32, make_tensor)
    check(name, *args, **sums)


def few_programs(number):
    """`tuned` of the kernels' launches with so many programs."""

    def tuned(kernel, x, size=None):
        entry = tuning(kernel, "sm_90", size)
        if "PROGRAMS" not in entry.blocks:
            return entry
        return type(entry)(dict(entry.blocks) | {"PROGRAMS": number}, entry.num_warps, entry.num_stages)

    return tuned


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_another_dtype_and_none(name, make_tensor):
    """float32 weights of bfloat16 rows keep their dtype in the gradient; weights and cotangents may be missing."""
    args, sums = operands_for(name, (4, 24), torch.bfloat16, make_tensor, torch.float32)
    check(name, *args, **sums, rtol=2e-2)
    none = (None,) * (len(args) - 2)
    check(name, *args[:2], *none, **sums)
    check(name, *args[:2], *none, **(sums | {"dtotal": None} if sums else {}))
    if "layer" in name:
        check(name, *args[:2], None, args[3], **sums, rtol=2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_strided_operands(name, make_tensor, device):
    """Rows of a wider matrix, transposed operands, and a cotangent that one number stands for."""
    args, sums = operands_for(name, (5, 48), torch.float32, make_tensor)
    wide = make_tensor((5, 3, 48))[:, 1]
    turned = make_tensor((48, 5)).T
    expanded = torch.ones((), device=device).expand(5, 48)
    one_row = make_tensor((48,)).expand(5, 48)
    for x, dy in ((wide, turned), (turned, wide), (wide, expanded), (wide, one_row)):
        strided = {"residual": turned, "dtotal": one_row} if sums else {}
        check(name, x, dy, *args[2:], **strided)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name, make_tensor):
    """Without rows the results are empty and the gradients of weights are 0."""
    (x, dy, *weights), sums = operands_for(name, (2, 0, 8), torch.float32, make_tensor)
    results = FORWARD[name](x, *([sums["residual"]] if sums else []), *weights, eps=EPS)
    first = results[0] if sums else results
    assert first.shape == x.shape
    dx, *dweights = BACKWARD[name](x, *weights, dy, *([None] if sums else []), eps=EPS)
    assert dx.shape == x.shape
    assert all(not d.any() and d.shape == (8,) for d in dweights)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_rounds_before_the_weight(name, make_tensor):
    """The bits of the op: the normalised value is rounded to bfloat16, then multiplied, then rounded again."""
    x, weight, residual = (
        make_tensor((8, 256), torch.bfloat16),
        make_tensor((256,)) * 3,
        0 * make_tensor((8, 256), torch.bfloat16),
    )
    y = FORWARD[name](x, *([residual] if "add" in name else []), weight, eps=EPS)
    y = y[0] if isinstance(y, tuple) else y
    normalised = rms(x.double()).to(torch.bfloat16)
    assert (y == (normalised.double() * weight.double()).to(torch.bfloat16)).double().mean() > 0.995  # but for ties of the norm


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_sum_is_rounded_before_it_is_normalised(name, make_tensor):
    """The sum has the bits of torch's addition, and the norm is that of the rounded sum."""
    x, residual = make_tensor((6, 96), torch.bfloat16), 100 * make_tensor((6, 96), torch.bfloat16)
    none = (None,) if "rms" in name else (None, None)
    y, total = FORWARD[name](x, residual, *none, eps=EPS)
    assert torch.equal(total, x + residual)
    expected = (rms if "rms" in name else layer)((x + residual).float())
    testing.assert_close(y, expected.to(torch.bfloat16), rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_equal_bits_every_time(name, make_tensor, monkeypatch):
    """Two backward passes give the same bits, also where programs walk over several rows."""
    monkeypatch.setattr("mpar.kernels._rms_norm.tuned", few_programs(3))
    (x, dy, *weights), sums = operands_for(name, (200, 40), torch.float32, make_tensor)
    extra = [sums["dtotal"]] if sums else []
    once, again = (BACKWARD[name](x, *weights, dy, *extra, eps=EPS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_rows_beyond_2_to_the_31_elements(name, device, make_tensor):
    """The last row is found, forward and backward, where rows are 2**26 elements apart: strides fit int32, offsets do not."""
    base = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)
    x = base.as_strided((33, 48), (2**26, 1))
    x.copy_(make_tensor((33, 48)))
    check(name, x, x.flip(0), *(None,) * (1 if name == "rms_norm" else 2))
    check(name, x.clone(), x, *(None,) * (1 if name == "rms_norm" else 2))


def test_rows_that_are_too_wide_are_refused(make_tensor):
    """The catalogue and the functions give the same reason, which names the width."""
    x = torch.empty(1, 40000, device="meta")
    for name in NAMES:
        assert "rows of 40000" in CATALOGUE[name][0].supports("sm_90", x, None)
    with pytest.raises(KernelError, match="rows of 40000"):
        FORWARD["rms_norm"](make_tensor((1, 40000)), None, eps=EPS)


@pytest.mark.parametrize("kernel", ["rms_norm_fwd", "rms_norm_bwd", "layer_norm_fwd", "layer_norm_bwd"])
def test_table_has_a_class_for_every_width(kernel):
    """Powers of two from 64 to what registers hold, on every chip."""
    largest = 32768 if kernel.endswith("fwd") else 8192
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert [int(c) for c in classes(kernel, arch)] == [2**i for i in range(6, largest.bit_length())]
