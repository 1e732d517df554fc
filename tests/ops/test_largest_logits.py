"""Logits of which only the largest are wanted: what a screen of 8 bits says of a matrix, and that it never hides one of them."""

import pytest
import torch

from mpar import ops
from mpar.errors import DtypeError, ShapeError
from mpar.ops import Screen, fill_screen
from mpar.ops._few_rows import few_rows
from tests.kernels_in_cpp import needs_kernels

DTYPES = [torch.bfloat16, torch.float32]


def screen_of(w_VD):
    V, D = w_VD.shape
    screen = Screen(torch.zeros(V, D, dtype=torch.uint8), *(torch.zeros(V, dtype=torch.int32) for _ in range(2)))
    fill_screen(screen, w_VD)
    return screen


def check(x_RD, w_VD, screen=None):
    """The largest logits of each row, and what else was computed, have the bits of the product; returns how many they are."""
    logits_RV = ops.largest_logits(x_RD[None], w_VD, screen or screen_of(w_VD), torch.ones(1, len(x_RD), dtype=torch.bool))[0]
    expected_RV = few_rows(x_RD, w_VD.T)
    computed = ~logits_RV.isneginf()
    torch.testing.assert_close(logits_RV[computed], expected_RV[computed], rtol=0, atol=0, equal_nan=True)
    largest_RV = expected_RV == expected_RV.nan_to_num(-torch.inf).amax(1, keepdim=True)
    assert computed[largest_RV | expected_RV.isnan()].all()
    return int(computed.sum())


@needs_kernels
@pytest.mark.parametrize("columns", [1, 3, 77, 500])
@pytest.mark.parametrize("inner", [1, 15, 33, 100, 896])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_logits_are_those_of_the_product(dtype, rows, inner, columns, make_tensor):
    """To the bit, of operands that are parts of wider ones."""
    check(make_tensor((rows, inner + 32), dtype)[:, :inner], make_tensor((columns, inner + 32), dtype)[:, :inner])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_largest_logit_is_hidden(dtype):
    """Of matrices and rows with outliers, equal tokens, and tokens that hardly differ, where 8 bits alone often find others."""
    assert sum(_others_by_screen(seed, dtype) for seed in range(40)) > 5


def _others_by_screen(seed, dtype):
    """Whether the screen alone has other tokens as the largest; that no largest one is hidden is checked."""
    generator = torch.Generator().manual_seed(seed)
    V, D = 2000, int(torch.randint(1, 300, (), generator=generator))
    x, w = torch.randn(3, D, generator=generator), torch.randn(V, D, generator=generator)
    x *= torch.randn(3, D, generator=generator).exp() ** (seed % 4)
    w *= torch.randn(V, D, generator=generator).exp() ** (seed % 3)
    twins = torch.randint(0, V, (2, 200), generator=generator)
    w[twins[0]] = w[twins[1]] * (1 + 1e-3 * torch.randn(200, 1, generator=generator) * (seed % 2))
    w[:300] += x[0] * 3 + 0.01 * torch.randn(300, D, generator=generator)
    w[300] = w[301] = 0
    x, w = x.to(dtype), w.to(dtype)
    check(x, w)
    screen = screen_of(w)
    found = (few_rows(x, w.T).float().argmax(1), (x.float() @ ((screen.codes.float() - 128) * scale(screen)).T).argmax(1))
    return not torch.equal(*found)


def scale(screen):
    return screen.absmax.view(torch.float32)[:, None] / 127


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_that_the_screen_takes_for_smaller(dtype, make_tensor):
    """The row lies along what its codes lack, and another token, which codes hold exactly, is between the two."""
    w = make_tensor((1, 64), dtype)
    screen = screen_of(w)
    codes = (screen.codes.double() - 128) * scale(screen).double()
    x = (w.double() - codes).to(dtype)
    exact, by_codes = (each.double() @ x.double().T for each in (w, codes))
    between = (0.2 * by_codes + 0.8 * exact).item() / x.double().abs().sum().item()
    found = torch.cat([w, (between * x.sign()).to(dtype)])
    logits = few_rows(x, found.T)[0]
    assert by_codes.item() < logits[1] < logits[0]
    check(x, found)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_an_outlier(dtype):
    """Beside it the other numbers are 0 in 16 bits, and the token that they alone make the largest is found."""
    x, w = torch.full((1, 64), 0.06, dtype=dtype), torch.zeros(2, 64, dtype=dtype)
    x[0, 0], w[0, 1:], w[1, 0] = 1000, 1, 0.002
    assert few_rows(x, w.T).argmax() == 0
    check(x, w)


@needs_kernels
def test_tokens_that_rounding_makes_equal():
    """Both are there, also the one that is smaller before it is rounded to bfloat16: the first of equal ones is taken."""
    x, w = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(2, 64, dtype=torch.bfloat16)
    x[0, 0], w[0, 0] = 0.02, 0
    assert few_rows(x, w.T)[0].diff() == 0 and few_rows(x.float(), w.float().T)[0].diff() > 0
    assert check(x, w) == 2


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_screen_says_how_far_it_is_away(dtype, make_tensor):
    """Each row is within its errors, and these are close."""
    w = make_tensor((300, 100), dtype) * torch.logspace(-20, 20, 300)[:, None].to(dtype)
    screen = screen_of(w)
    away = (w.double() - (screen.codes.double() - 128) * scale(screen).double()).norm(dim=1)
    errors = screen.errors.view(torch.float32).double()
    assert (away <= errors).all() and (errors <= 1.1 * away + 2e-5 * w.double().norm(dim=1)).all()


@needs_kernels
def test_few_logits_are_computed(make_tensor):
    """Of 20,000 tokens at random, a few dozen; with a single thread the same."""
    x, w = make_tensor((4, 512), torch.bfloat16), make_tensor((20_000, 512), torch.bfloat16)
    count = check(x, w)
    assert count < 4 * 200
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert check(x, w) == count
    finally:
        torch.set_num_threads(num_threads)


@needs_kernels
def test_what_is_not_finite(make_tensor):
    """A token with such numbers is always computed, a row with them has all its logits; zeros have them too."""
    x, w = make_tensor((2, 64)), make_tensor((500, 64))
    w[3, 5], w[400, 0], w[401, 1], w[402] = torch.nan, torch.inf, -torch.inf, 0
    screen = screen_of(w)
    assert screen.errors.view(torch.float32).isinf().nonzero()[:, 0].tolist() == [3, 400, 401]
    assert check(x, w, screen) < 200
    for bad in (torch.nan, torch.inf):
        y = x.clone()
        y[1, 7] = bad
        logits = ops.largest_logits(y[None], w, screen, torch.ones(1, 2, dtype=torch.bool))[0]
        torch.testing.assert_close(logits, few_rows(y, w.T), rtol=0, atol=0, equal_nan=True)
    assert check(torch.zeros(1, 64), make_tensor((500, 64))) == 500


@needs_kernels
def test_rows_that_are_no_tokens_bound_no_others(make_tensor):
    """Padding has the largest logit here, and the tokens below it are found nevertheless, however often the screen is made."""
    x = make_tensor((1, 64))
    w = torch.cat([-x.expand(1000, 64) + 0.1 * make_tensor((1000, 64)), torch.zeros(28, 64)])
    screen = screen_of(w)
    screen.errors.view(torch.float32)[1000:] = torch.nan
    fill_screen(screen, w)
    logits_V = ops.largest_logits(x[None], w, screen, torch.ones(1, 1, dtype=torch.bool))[0, 0]
    expected_V = few_rows(x, w.T)[0]
    assert torch.equal(logits_V[:1000].max(), expected_V[:1000].max()) and (logits_V[1000:] == 0).all()
    assert logits_V[:1000].isneginf().sum() > 900


@needs_kernels
def test_a_row_is_finite_again(make_tensor):
    """A screen that was made of a row with NaN is that of other numbers when it is made anew."""
    bad, sound = make_tensor((500, 64)), make_tensor((500, 64))
    bad[3, 5] = torch.nan
    screen = screen_of(bad)
    fill_screen(screen, sound)
    assert all(torch.equal(a, b) for a, b in zip(vars(screen).values(), vars(screen_of(sound)).values(), strict=True))


@needs_kernels
@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-15, 1e15])
def test_numbers_near_the_ends_of_float32(scale, make_tensor):
    """Whatever underflows, no largest logit is hidden."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(2, 64, generator=generator) * scale, torch.randn(200, 64, generator=generator) * 10.0 ** -(seed % 20)
        check(x.bfloat16(), w.bfloat16())
        check(x, w)


@needs_kernels
def test_where_most_logits_can_be_the_largest(make_tensor):
    """All are computed, as it takes less time; long rows, whose products do not fit 32 bits, are added in parts."""
    x, w = make_tensor((2, 8192)), make_tensor((2000, 8192))
    x[:, 5] = 100
    assert check(x, w) == 4000
    assert check(torch.ones(1, 70_001), torch.ones(3, 70_001)) == 3
    w = torch.ones(64, 5000) * torch.linspace(-1, 1, 64)[:, None]
    assert check(torch.ones(1, 5000), w) == 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_where_all_logits_are_computed(dtype, make_tensor):
    """If one row is not greedy, if there are many rows, and in dtypes without a kernel."""
    w = make_tensor((300, 64), dtype)
    screen = Screen(torch.zeros(300, 64, dtype=torch.uint8), *(torch.zeros(300, dtype=torch.int32) for _ in range(2)))
    for rows, greedy in ((3, [True, False, True]), (5, [True] * 5), (1, [False])):
        x = make_tensor((1, rows, 64), dtype)
        logits = ops.largest_logits(x, w, screen, torch.tensor([greedy]))
        torch.testing.assert_close(logits, ops.einsum("bsd,vd->bsv", x, w), rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit(make_tensor):
    """Shapes of x, matrix and screen, and dtypes."""
    x, w, greedy = make_tensor((1, 2, 8)), make_tensor((5, 8)), torch.ones(1, 2, dtype=torch.bool)
    screen = Screen(torch.zeros(5, 8, dtype=torch.uint8), *(torch.zeros(5, dtype=torch.int32) for _ in range(2)))
    with pytest.raises(ShapeError, match=r"they must be \(B, R, D\), \(V, D\), \(B, R\)"):
        ops.largest_logits(x, w, screen, greedy[:, :1])
    with pytest.raises(ShapeError, match=r"absmax \(4,\)"):
        ops.largest_logits(x, w, Screen(screen.codes, screen.absmax[:4], screen.errors), greedy)
    with pytest.raises(DtypeError, match=r"greedy are torch\.uint8, torch\.int32, torch\.int32, torch\.int64"):
        ops.largest_logits(x, w, screen, greedy.long())
