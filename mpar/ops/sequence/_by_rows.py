"""The convolution and the scan of tokens of many rows, each of which goes on from the state of its row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive
from mpar.ops.sequence._causal_conv1d import causal_conv1d_p
from mpar.ops.sequence._ssd_scan import ssd_scan_p

__all__ = ["conv_by_rows", "scan_by_rows"]

conv_by_rows_p = Primitive("conv_by_rows", "x, weight, bias?, state, rows, positions -> y, new_state")
scan_by_rows_p = Primitive("scan_by_rows", "x, dt, a, b, c, d, state, rows, positions -> y, new_state", chunk="int")


def conv_by_rows(
    x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, state_BRWC: Tensor, rows_BT: Tensor, positions_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` of the tokens of each row, and the state of all rows after them: their last W - 1 inputs.

    Tokens of a row, whose number is in `rows_BT`, stand one after the other. A row whose first token is at position 0 begins
    with zeros instead of the state. A token of row -1 is padding; its y is 0. Rows without tokens keep their state. There is no
    gradient. Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return conv_by_rows_p.bind(x_BTC, weight_CW, bias_C, state_BRWC, rows_BT, positions_BT)


def scan_by_rows(
    x_BTNH: Tensor,
    dt_BTN: Tensor,
    a_N: Tensor,
    b_BTGK: Tensor,
    c_BTGK: Tensor,
    d_N: Tensor,
    state_BRNHK: Tensor,
    rows_BT: Tensor,
    positions_BT: Tensor,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`ssd_scan` of the tokens of each row, and the state of all rows after them. Rows are those of `conv_by_rows`."""
    return scan_by_rows_p.bind(x_BTNH, dt_BTN, a_N, b_BTGK, c_BTGK, d_N, state_BRNHK, rows_BT, positions_BT, chunk=chunk)


def _check(name: str, x: Tensor, state: Tensor, rest: tuple[int, ...], rows: Tensor, positions: Tensor) -> None:
    """Raise unless there is a state for each row, and a row and a position for each token. rest: the last dims of the state."""
    shapes = f"{name} of x {tuple(x.shape)}, state {tuple(state.shape)}"
    if state.ndim < 2 or state.shape[0] != x.shape[0] or tuple(state.shape[2:]) != rest:
        raise ShapeError(f"{shapes}: the state must be ({x.shape[0]}, R, {', '.join(map(str, rest))})")
    if rows.shape != x.shape[:2] or positions.shape != x.shape[:2]:
        raise ShapeError(
            f"{shapes}: rows {tuple(rows.shape)} and positions {tuple(positions.shape)} must be {tuple(x.shape[:2])}"
        )
    if rows.dtype != torch.int64 or positions.dtype != torch.int64:
        raise DtypeError(f"{shapes}: rows and positions must be int64, not {rows.dtype} and {positions.dtype}")


@conv_by_rows_p.def_abstract
def _abstract_conv(x, weight, bias, state, rows, positions):
    _check("conv_by_rows", x, state, (weight.shape[-1] - 1, *x.shape[2:]), rows, positions)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(state.shape, dtype=state.dtype, device=state.device)


@scan_by_rows_p.def_abstract
def _abstract_scan(x, dt, a, b, c, d, state, rows, positions, *, chunk):
    _check("scan_by_rows", x, state, (*x.shape[2:], b.shape[-1]), rows, positions)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(state.shape, dtype=state.dtype, device=state.device)


@conv_by_rows_p.def_impl
def _impl_conv(x, weight, bias, state, rows, positions):
    y, new_state = x.new_zeros(x.shape), state.clone(memory_format=torch.contiguous_format)
    for group in range(x.shape[0]):
        for tokens_NS, rows_N in _runs(rows[group]):
            x_NSC = x[group][tokens_NS]
            before_NWC = _state_before(state[group], rows_N, positions[group][tokens_NS[:, 0]]).to(x.dtype)
            y[group][tokens_NS] = causal_conv1d_p.meaning(x_NSC, weight, bias, before_NWC, None)
            new_state[group][rows_N] = torch.cat([before_NWC, x_NSC], 1)[:, x_NSC.shape[1] :].to(state.dtype)
    return y, new_state


@scan_by_rows_p.def_impl
def _impl_scan(x, dt, a, b, c, d, state, rows, positions, *, chunk):
    y, new_state = x.new_zeros(x.shape), state.clone(memory_format=torch.contiguous_format)
    for group in range(x.shape[0]):
        for tokens_NS, rows_N in _runs(rows[group]):
            x_run, dt_run, b_run, c_run = (given[group][tokens_NS] for given in (x, dt, b, c))
            before = _state_before(state[group], rows_N, positions[group][tokens_NS[:, 0]])
            y_run, after = ssd_scan_p.meaning(x_run, dt_run, a, b_run, c_run, d, before, None, chunk=chunk)
            y[group][tokens_NS] = y_run
            new_state[group][rows_N] = after.to(state.dtype)
    return y, new_state


def _runs(rows_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`(tokens (N, S), rows (N,))`: runs of tokens of one row; those of one length are computed together."""
    rows = rows_T.tolist()
    by_length: dict[int, list[int]] = {}
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and rows[end] == rows[start]:
            end += 1
        if rows[start] >= 0:
            by_length.setdefault(end - start, []).append(start)
        start = end
    for length, starts in sorted(by_length.items()):
        first_N = torch.tensor(starts, device=rows_T.device)
        yield first_N[:, None] + torch.arange(length, device=rows_T.device), rows_T[first_N]


def _state_before(state: Tensor, rows_N: Tensor, first_N: Tensor) -> Tensor:
    """The state of each row before its tokens: zero if the first of them is at position 0."""
    begins = (first_N == 0).view(-1, *[1] * (state.ndim - 1))
    return state[rows_N].masked_fill(begins, 0.0)


conv_by_rows_p.def_sharding("b t ..., ... w, ..., b r v ..., b t, b t -> b t ..., b r v ...", need_replication="t r v w")
scan_by_rows_p.def_sharding(
    "b t (g m) h, b t (g m), (g m), b t g k, b t g k, (g m), b r (g m) h k, b t, b t -> b t (g m) h, b r (g m) h k",
    need_replication="t r h k",
)
for _primitive in (conv_by_rows_p, scan_by_rows_p):
    _primitive.asks_host = True
    _primitive.def_batching_loop()


@conv_by_rows_p.def_cost
def _cost_conv(x, weight, bias, state, rows, positions):
    return Cost(flops=2 * x.numel() * weight.shape[-1], bytes=2 * (x.nbytes + state.nbytes), workspace=3 * x.nbytes)


@scan_by_rows_p.def_cost
def _cost_scan(x, dt, a, b, c, d, state, rows, positions, *, chunk):
    assert ssd_scan_p.cost is not None
    one = ssd_scan_p.cost(x, dt, a, b, c, d, None, None, chunk=chunk)
    return Cost(flops=one.flops, bytes=one.bytes + 2 * state.nbytes, workspace=one.workspace + state.nbytes)
