"""Einsum: any equation against torch.einsum in float64, and equations that are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar import ops, testing
from mpar.errors import DtypeError, ShapeError
from mpar.ops import PRIMITIVES
from tests.tiers import examples

SIZES = {"a": 2, "b": 3, "c": 1, "d": 4, "e": 5}
letters = st.permutations("abcde").map("".join)


@st.composite
def equations(draw):
    """Two operands of up to 4 dims and a result of any of their letters in any order."""
    a, b = (draw(letters)[: draw(st.integers(0, 4))] for _ in range(2))
    output = draw(st.permutations(sorted(set(a + b))))
    return f"{a},{b}->{''.join(output[: draw(st.integers(0, len(output)))])}"


@settings(max_examples=examples(150), deadline=None)
@given(equation=equations(), strided=st.booleans())
def test_matches_torch(equation, strided):
    """Values, first and second derivatives are right and results contiguous, for sums, products and transposes alike."""
    generator = torch.Generator().manual_seed(0)
    operands = []
    for part in equation.split("->")[0].split(","):
        x = torch.randn([SIZES[c] for c in part], dtype=torch.float64, generator=generator)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if strided and x.ndim else x
        operands.append(x.requires_grad_())
    y, expected = ops.einsum(equation, *operands), torch.einsum(equation, *operands)
    testing.assert_close(y, expected, name="y")
    assert y.is_contiguous()
    firsts = [torch.autograd.grad(out.square().sum(), operands, create_graph=True) for out in (y, expected)]
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in first), operands) for first in firsts]
    for actual, wanted in (*zip(*firsts, strict=True), *zip(*seconds, strict=True)):
        testing.assert_close(actual, wanted, name="derivative")


@settings(max_examples=examples(100), deadline=None)
@given(equation=equations(), strided=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_product_is_added(equation, strided, dtype):
    """Both forms give the same bits, those of the sum but for rounding; one of them writes over what is added to."""
    generator = torch.Generator().manual_seed(0)
    add, add_over = (PRIMITIVES[name].op for name in ("einsum_add", "einsum_add_over"))
    operands = []
    for part in equation.split("->")[0].split(","):
        a = torch.randn([SIZES[c] for c in part], dtype=torch.float64, generator=generator).to(dtype)
        operands.append(a.transpose(0, -1).contiguous().transpose(0, -1) if strided and a.ndim else a)
    product = torch.einsum(equation, *(a.double() for a in operands))
    x = torch.randn(product.shape, dtype=torch.float64, generator=generator).to(dtype)
    kept = x.clone()
    y = add(x, *operands, equation=equation)
    assert torch.equal(x, kept) and y.dtype == dtype
    testing.assert_close(y, (kept.double() + product).to(dtype), name="y")
    assert torch.equal(add_over(x, *operands, equation=equation), y) and torch.equal(x, y)


@pytest.mark.parametrize("rows", [3, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_with_a_matrix_is_added(rows, dtype, make_tensor):
    """For a few rows, which kernels multiply that cannot add, and for many."""
    x, a, b = make_tensor((2, rows, 96), dtype), make_tensor((2, rows, 64), dtype), make_tensor((64, 96), dtype)
    for matrix in (b, b.T.contiguous().T):
        y = PRIMITIVES["einsum_add"].op(x, a, matrix, equation="bsd,df->bsf")
        testing.assert_close(y, (x.double() + a.double() @ b.double()).to(dtype), name="y")


def test_only_what_fits_is_added_to(make_tensor):
    """Another shape or dtype is refused."""
    a, b = make_tensor((3, 4), torch.float32), make_tensor((4, 5), torch.float32)
    for x in (make_tensor((5, 3), torch.float32), make_tensor((3, 5), torch.float64)):
        with pytest.raises(ShapeError, match="einsum_add"):
            PRIMITIVES["einsum_add"].op(x, a, b, equation="ab,bc->ac")


@pytest.mark.parametrize("equation", ["bsd,dr->bsr", "bsd,bsr->dr", "bsd,bsr->rd", "rd,bsd->bsr", "sbd,dr->bsr"])
def test_few_columns(equation, make_tensor):
    """Products of float32 that are computed as their transposes are right and contiguous."""
    sizes = {"b": 3, "s": 20, "d": 24, "r": 2}
    operands = [make_tensor(tuple(sizes[c] for c in part), torch.float32) for part in equation.partition("->")[0].split(",")]
    y = ops.einsum(equation, *operands)
    testing.assert_close(y, torch.einsum(equation, *(x.double() for x in operands)), name="y")
    assert y.is_contiguous()


def test_one_and_three_operands(make_tensor):
    """One operand is summed and transposed; several are folded left to right, keeping the letters that are still needed."""
    a, b, c = make_tensor((2, 3), torch.float64), make_tensor((3, 4), torch.float64), make_tensor((4, 2, 5), torch.float64)
    testing.assert_close(ops.einsum("ab->b", a), a.sum(0))
    testing.assert_close(ops.einsum(" ab -> ba ", a), a.T)
    testing.assert_close(ops.einsum("ab,bc,cae->ea", a, b, c), torch.einsum("ab,bc,cae->ea", a, b, c))


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ab,bc", "one '->'"),
        ("a...,b->a", "letters, commas"),
        ("aa,bc->ac", "repeated in \\['aa'\\]"),
        ("ab,bc->acc", "repeated in \\['acc'\\]"),
        ("ab,bc->ad", "\\['d'\\] of the result"),
        ("ab->a", "1 operands, 2 are given"),
        ("abc,bc->ac", "has 2 dims, 'abc' has 3"),
        ("ab,ac->bc", "'a' has size 2 in a and 3 in b"),
    ],
)
def test_wrong_equations_are_refused(equation, message, make_tensor):
    """What is wrong with an equation, or with sizes for it, is said; size 1 does not broadcast."""
    with pytest.raises(ShapeError, match=message):
        ops.einsum(equation, make_tensor((2, 3)), make_tensor((3, 4)))


def test_mixed_dtypes_are_refused(make_tensor):
    """Operands share one floating dtype."""
    with pytest.raises(DtypeError, match="cast one"):
        ops.einsum("ab,bc->ac", make_tensor((2, 3)), make_tensor((3, 4), torch.bfloat16))
