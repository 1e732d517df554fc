"""Which operand of a contraction keeps a mesh axis that both want for factors of their own."""

import pytest
import torch

from mpar import Mesh, P, jit, ops

MESH = Mesh(dp=4, tp=2)
D = 4


def product(x_BD: torch.Tensor, w_DF: torch.Tensor) -> torch.Tensor:
    return ops.einsum("bd,df->bf", x_BD, w_DF)


def turned_product(w_DF: torch.Tensor, x_BD: torch.Tensor) -> torch.Tensor:
    return ops.einsum("df,bd->bf", w_DF, x_BD)


def result_spec(fn, shapes, in_specs) -> P:
    """Where the result of `fn` comes to lie if nobody says where it should."""
    return jit(fn, mesh=MESH, in_specs=in_specs).lower(*(torch.zeros(shape) for shape in shapes)).out_specs


def test_the_larger_operand_keeps_the_axis():
    """Both want tp, one for its rows, one for its columns: the one with more bytes stays as it is, the other is gathered."""
    specs = (P("tp"), P(None, "tp"))
    assert result_spec(product, [(16, D), (D, 8)], specs) == P("tp")
    assert result_spec(product, [(8, D), (D, 16)], specs) == P(None, "tp")


def test_equal_operands_go_by_order():
    """The first one of two equal operands keeps the axis, whichever it is."""
    assert result_spec(product, [(8, D), (D, 8)], (P("tp"), P(None, "tp"))) == P("tp")
    assert result_spec(turned_product, [(D, 8), (8, D)], (P(None, "tp"), P("tp"))) == P(None, "tp")


@pytest.mark.parametrize(("rows", "x_keeps_tp"), [(16, False), (24, False), (40, True)])
def test_bytes_are_those_of_a_rank(rows, x_keeps_tp):
    """`x` has more bytes than `w` in all; dp divides it too, and a shard is what moves: `x` keeps tp if its shard is larger."""
    shapes, specs = [(rows, D), (D, 8)], (P(("dp", "tp")), P(None, "tp"))
    x_bytes, w_bytes = rows * D / 8, D * 8 / 2
    assert rows * D > D * 8 and (x_bytes > w_bytes) == x_keeps_tp
    kept = P(("dp", "tp")) if x_keeps_tp else P("dp", "tp")
    assert result_spec(product, shapes, specs) == kept
    assert result_spec(turned_product, shapes[::-1], specs[::-1]) == kept


def test_what_the_smaller_operand_still_has_it_keeps():
    """`w`, which is larger, keeps tp; `x` gives up tp alone and stays divided by dp."""
    assert result_spec(product, [(16, D), (D, 64)], (P(("dp", "tp")), P(None, "tp"))) == P("dp", "tp")


@pytest.mark.parametrize("shapes", [[(16, D), (D, 8)], [(8, D), (D, 16)], [(8, D), (D, 8)]], ids=str)
def test_the_choice_changes_no_result(shapes, make_tensor):
    """Whichever operand leads, the product is the same."""
    x_BD, w_DF = (make_tensor(shape, torch.float64) for shape in shapes)
    found = jit(product, mesh=MESH, in_specs=(P(("dp", "tp")), P(None, "tp"))).lower(x_BD, w_DF).simulate(x_BD, w_DF)
    torch.testing.assert_close(found, x_BD @ w_DF)
