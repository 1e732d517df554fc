"""Convolution and scan of tokens of many rows: each row as the plain op has it alone, and on simulated ranks."""

import pytest
import torch

from mpar import check, ops, testing
from mpar.errors import DtypeError, ShapeError
from mpar.ops import PRIMITIVES

ROWS = torch.tensor([[2, 2, 2, -1, 0, 3, 3, 3]])  # two runs of one length, a single token, padding; row 1 has no tokens
POSITIONS = torch.tensor([[0, 1, 2, 0, 7, 4, 5, 6]])
RUNS = {2: (0, 3, True), 0: (4, 5, False), 3: (5, 8, False)}
"""For each row its tokens, and whether it begins with them."""


def _operands(make_tensor):
    shapes = {"x": (1, 8, 4, 3), "dt": (1, 8, 4), "a": (4,), "b": (1, 8, 2, 5), "c": (1, 8, 2, 5), "d": (4,)}
    return {name: make_tensor(shape, torch.float64) for name, shape in shapes.items()} | {
        "state": make_tensor((1, 4, 4, 3, 5), torch.float64)
    }


def test_each_row_goes_on_from_its_state(make_tensor):
    """Rows that begin start from zero, others from their state; padding gives zero, and rows without tokens keep their state."""
    given = _operands(make_tensor)
    x, dt, a, b, c, d, state = given.values()
    weight, bias, kept = (make_tensor(shape, torch.float64) for shape in ((4, 3, 4), (4, 3), (1, 4, 3, 4, 3)))
    y, after = ops.scan_by_rows(*given.values(), ROWS, POSITIONS, chunk=2)
    conv, kept_after = ops.conv_by_rows(x, weight, bias, kept, ROWS, POSITIONS)
    for row, (start, end, begins) in RUNS.items():
        part = slice(start, end)
        before, old = (torch.zeros_like(s[:, row]) if begins else s[:, row] for s in (state, kept))
        alone = x[:, part], dt[:, part], a, b[:, part], c[:, part], d
        expected, final = ops.ssd_scan(*alone, state_BNHK=before)
        testing.assert_close(y[:, part], expected)
        testing.assert_close(after[:, row], final)
        testing.assert_close(conv[:, part], ops.causal_conv1d(x[:, part], weight, bias, state_BTC=old))
        testing.assert_close(kept_after[:, row], torch.cat([old, x[:, part]], 1)[:, -3:])
    assert not y[:, 3].any() and not conv[:, 3].any()
    assert torch.equal(after[:, 1], state[:, 1]) and torch.equal(kept_after[:, 1], kept[:, 1])


def test_sharding_rules_hold(make_tensor):
    """Groups of rows, heads and channels may be sharded: simulated ranks give the same."""
    B, T = 4, 4
    rows, positions = (
        torch.tensor([[1, 1, 0, 2]]).expand(B, T).contiguous(),
        torch.tensor([[3, 4, 0, 0]]).expand(B, T).contiguous(),
    )
    shapes = ((B, T, 8, 2), (B, T, 8), (8,), (B, T, 4, 3), (B, T, 4, 3), (8,), (B, 4, 8, 2, 3))
    operands = [make_tensor(shape, torch.float64) for shape in shapes]
    assert {"b", "g"} <= set(check(PRIMITIVES["scan_by_rows"], (*operands, rows, positions), {"chunk": 2}))
    shapes = ((B, T, 4, 4), (4, 4, 3), (4, 4), (B, 4, 2, 4, 4))
    operands = [make_tensor(shape, torch.float64) for shape in shapes]
    assert "b" in check(PRIMITIVES["conv_by_rows"], (*operands, rows, positions))


def test_what_is_refused(make_tensor):
    """States that do not fit, and rows that are not int64."""
    given = _operands(make_tensor)
    with pytest.raises(ShapeError, match=r"the state must be \(1, R, 4, 3, 5\)"):
        ops.scan_by_rows(*{**given, "state": given["state"][..., :4]}.values(), ROWS, POSITIONS, chunk=2)
    with pytest.raises(ShapeError, match=r"positions \(1, 7\) must be \(1, 8\)"):
        ops.scan_by_rows(*given.values(), ROWS, POSITIONS[:, 1:], chunk=2)
    with pytest.raises(DtypeError, match="rows and positions must be int64"):
        ops.scan_by_rows(*given.values(), ROWS.int(), POSITIONS, chunk=2)
