"""State-space scan with scalar decay, in chunks: the SSD layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6).

Within a chunk of Q tokens the recurrence is a product with a masked matrix; from chunk to chunk a state is handed on. Work grows
as S * Q, not S**2, and nearly all of it is products of matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["ssd_scan", "ssd_scan_p"]

ssd_scan_p = Primitive("ssd_scan", "x, dt, a, b, c, d?, state?, documents? -> y, final", chunk="int")


def ssd_scan(
    x_BSNH: Tensor,
    dt_BSN: Tensor,
    a_N: Tensor,
    b_BSGK: Tensor,
    c_BSGK: Tensor,
    d_N: Tensor | None = None,
    *,
    state_BNHK: Tensor | None = None,
    documents_BS: Tensor | None = None,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """`(y_BSNH, final_BNHK)` of the recurrence over tokens t, for each head n, whose group is g = n // (N / G):

        state[t] = exp(dt[t] a) state[t - 1] + dt[t] x[t] b[t]^T       y[t] = state[t] c[t] + d x[t]

    K is the size of the state. `dt_BSN` is the time step after softplus and limits, and `a_N` is negative. `state_BNHK` is the
    state before the first token (default 0), `final_BNHK` the state after the last one. Where `documents_BS` changes from one
    token to the next, the state starts again from 0; `state_BNHK` belongs to the document of the first token. `chunk` is Q, and
    does not change the meaning. Sums and the final state are float32 or wider; `y_BSNH` has the dtype of `x_BSNH`. Documents have
    no gradient.
    Raises ShapeError or DtypeError if the operands do not fit each other, ConfigError if `chunk` is not positive.
    """
    return ssd_scan_p.bind(x_BSNH, dt_BSN, a_N, b_BSGK, c_BSGK, d_N, state_BNHK, documents_BS, chunk=chunk)


@ssd_scan_p.def_abstract
def _abstract(x, dt, a, b, c, d, state, documents, *, chunk):
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "state": state, "documents": documents}
    given = {name: operand for name, operand in given.items() if operand is not None}
    shapes = "ssd_scan of " + ", ".join(f"{name} {tuple(operand.shape)}" for name, operand in given.items())
    if x.ndim != 4 or b.ndim != 4:
        raise ShapeError(f"{shapes}: x must be (B, S, N, H) and b (B, S, G, K)")
    (B, S, N, H), (G, K) = x.shape, b.shape[2:]
    expected = {"dt": (B, S, N), "a": (N,), "b": (B, S, G, K), "c": (B, S, G, K), "d": (N,), "state": (B, N, H, K)}
    expected["documents"] = (B, S)
    problems = [
        f"{name} must be {expected[name]}"
        for name, operand in given.items()
        if tuple(operand.shape) != expected.get(name, x.shape)
    ]
    if not G or N % G:
        problems.append(f"{G} groups do not divide {N} heads")
    if problems:
        raise ShapeError(f"{shapes}:\n" + "\n".join(problems))
    wrong = {name: operand.dtype for name, operand in given.items() if name != "documents" and not operand.is_floating_point()}
    if wrong:
        raise DtypeError(f"{shapes}: these must be floating: {wrong}")
    if documents is not None and documents.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{shapes}: documents must be int32 or int64, not {documents.dtype}")
    if chunk < 1:
        raise ConfigError(f"{shapes}: chunk is {chunk}, must be a positive number of tokens")
    final = torch.empty((B, N, H, K), dtype=_wide(x, dt, a, b, c, d, state), device=x.device)
    return torch.empty((B, S, N, H), dtype=x.dtype, device=x.device), final


def _wide(*operands: Tensor | None) -> torch.dtype:
    wide = torch.float32
    for operand in operands:
        wide = wide if operand is None else torch.promote_types(wide, operand.dtype)
    return wide


class _Chunk(NamedTuple):
    """The operands of a chunk of Q tokens, in the wide dtype, with heads as G groups of R; and decay factors.

    log:        the sum of dt a over the tokens of the chunk up to each token: the logarithm of the decay since the start.
    runs:       the number of each token's run of equal documents.
    from_start: for each token the decay of the state before the chunk until this token.
    to_end:     for each token the decay of its contribution until the end of the chunk.
    across:     the decay of the state before the chunk until its end.
    Decays are 0 across the border of documents.
    """

    x_BQGRH: Tensor
    dt_BQGR: Tensor
    b_BQGK: Tensor
    c_BQGK: Tensor
    log_BQGR: Tensor
    runs_BQ: Tensor | None
    from_start_BQGR: Tensor
    to_end_BQGR: Tensor
    across_BGR: Tensor

    def within_BGRQP(self) -> Tensor:
        """The decay of the contribution of token p until token q; 0 if q does not see p."""
        log_BGRQ = self.log_BQGR.permute(0, 2, 3, 1)
        size = log_BGRQ.shape[3]
        visible = torch.ones(size, size, dtype=torch.bool, device=log_BGRQ.device).tril_()
        if self.runs_BQ is not None:
            visible = (visible & (self.runs_BQ[:, :, None] == self.runs_BQ[:, None, :]))[:, None, None]
        return (log_BGRQ[..., :, None] - log_BGRQ[..., None, :]).masked_fill_(~visible, -torch.inf).exp_()

    def scores_BGQP(self) -> Tensor:
        """The product of c and b for all pairs of tokens."""
        return torch.einsum("bqgk,bpgk->bgqp", self.c_BQGK, self.b_BQGK)

    def next_state(self, state_BGRHK: Tensor) -> Tensor:
        """The state after the chunk, from the state before it."""
        scaled_BQGRH = self.x_BQGRH * (self.dt_BQGR * self.to_end_BQGR).unsqueeze(-1)
        added_BGRHK = torch.einsum("bqgrh,bqgk->bgrhk", scaled_BQGRH, self.b_BQGK)
        return added_BGRHK.addcmul_(state_BGRHK, self.across_BGR[..., None, None])


def _slices(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _runs(documents: Tensor | None) -> Tensor | None:
    """For each token the number of its run of equal documents, counted from 0."""
    if documents is None:
        return None
    changes_BS = torch.zeros(documents.shape, dtype=torch.int64, device=documents.device)
    changes_BS[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return changes_BS.cumsum(1)


def _chunk(x, dt, a, b, c, runs, rows: slice, wide: torch.dtype) -> _Chunk:
    groups = (b.shape[2], x.shape[2] // b.shape[2])
    dt_BQGR = dt[:, rows].to(wide).unflatten(2, groups)
    log_BQGR = (dt_BQGR * a.to(wide).view(groups)).cumsum(1)
    from_start, to_end, across = log_BQGR.exp(), (log_BQGR[:, -1:] - log_BQGR).exp_(), log_BQGR[:, -1].exp()
    runs_BQ = None if runs is None else runs[:, rows]
    if runs_BQ is not None:
        before_B1 = runs[:, max(rows.start - 1, 0), None]
        from_start *= (runs_BQ == before_B1)[:, :, None, None]
        to_end *= (runs_BQ == runs_BQ[:, -1:])[:, :, None, None]
        across = across * (runs_BQ[:, -1:] == before_B1)[:, :, None]
    x_BQGRH = x[:, rows].to(wide).unflatten(2, groups)
    return _Chunk(x_BQGRH, dt_BQGR, b[:, rows].to(wide), c[:, rows].to(wide), log_BQGR, runs_BQ, from_start, to_end, across)


def _first_state(x: Tensor, b: Tensor, state: Tensor | None, wide: torch.dtype) -> Tensor:
    (B, _, N, H), (G, K) = x.shape, b.shape[2:]
    first_BNHK = x.new_zeros((B, N, H, K), dtype=wide) if state is None else state.to(wide)
    return first_BNHK.unflatten(1, (G, N // G))


@ssd_scan_p.def_impl
def _impl(x, dt, a, b, c, d, state, documents, *, chunk):
    wide, runs = _wide(x, dt, a, b, c, d, state), _runs(documents)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = _first_state(x, b, state, wide)
    for rows in _slices(x.shape[1], chunk):
        current = _chunk(x, dt, a, b, c, runs, rows, wide)
        weights_BGRQP = current.within_BGRQP().mul_(current.scores_BGQP().unsqueeze(2))
        y_BQGRH = torch.einsum("bgrqp,bpgrh->bqgrh", weights_BGRQP, current.x_BQGRH * current.dt_BQGR.unsqueeze(-1))
        old_BQGRH = torch.einsum("bqgk,bgrhk->bqgrh", current.c_BQGK, state)
        y_BQNH = y_BQGRH.addcmul(old_BQGRH, current.from_start_BQGR.unsqueeze(-1)).flatten(2, 3)
        y[:, rows] = y_BQNH if d is None else y_BQNH + x[:, rows].to(wide) * d.to(wide).unsqueeze(-1)
        state = current.next_state(state)
    return y, state.flatten(1, 2).clone(memory_format=torch.contiguous_format)


@ssd_scan_p.def_vjp("x, dt, a, b, c, d, state, documents, dy, dfinal -> dx, ddt, da, db, dc, dd, dstate")
def _vjp(x, dt, a, b, c, d, state, documents, dy, dfinal, *, chunk):
    """Goes through chunks from last to first, after computing the state before each of them again."""
    wide, runs, groups = _wide(x, dt, a, b, c, d, state), _runs(documents), (b.shape[2], x.shape[2] // b.shape[2])
    dx, ddt, db, dc = (torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (x, dt, b, c))
    da_GR, all_rows = a.new_zeros(groups, dtype=wide), _slices(x.shape[1], chunk)
    states = [_first_state(x, b, state, wide)]
    for rows in all_rows[:-1]:
        states.append(_chunk(x, dt, a, b, c, runs, rows, wide).next_state(states[-1]))
    dstate_before = _first_state(x, b, dfinal, wide)
    for rows in reversed(all_rows):
        current = _chunk(x, dt, a, b, c, runs, rows, wide)
        dy_BQGRH = torch.zeros_like(current.x_BQGRH) if dy is None else dy[:, rows].to(wide).unflatten(2, groups)
        du, db_BQGK, dc_BQGK, dlog, dstate_before = _chunk_backward(current, states.pop(), dy_BQGRH, dstate_before)
        dlog_decay = dlog.flip(1).cumsum(1).flip(1)  # the gradient of dt a, which is in the sums of all later tokens
        ddt[:, rows] = (dlog_decay * a.to(wide).view(groups)).add_((du * current.x_BQGRH).sum(-1)).flatten(2, 3)
        da_GR += (dlog_decay * current.dt_BQGR).sum((0, 1))
        dx_BQGRH = du * current.dt_BQGR.unsqueeze(-1)
        if d is not None:
            dx_BQGRH.addcmul_(dy_BQGRH, d.to(wide).view(*groups, 1))
        dx[:, rows], db[:, rows], dc[:, rows] = dx_BQGRH.flatten(2, 3), db_BQGK, dc_BQGK
    dd = x.new_empty(0) if d is None else _skip_gradient(x, dy, d)
    dstate = (
        x.new_empty(0) if state is None else dstate_before.flatten(1, 2).to(state.dtype, memory_format=torch.contiguous_format)
    )
    return dx, ddt, da_GR.flatten().to(a.dtype), db, dc, dd, dstate


def _chunk_backward(current: _Chunk, state, dy, dnext) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(du, db, dc, dlog, dstate)`: gradients of u = dt x, b, c, of the sums of dt a, and of the state before the chunk.

    `state` is the state before the chunk, `dnext` the gradient of the state after it.
    """
    u = current.x_BQGRH * current.dt_BQGR.unsqueeze(-1)
    within, scores = current.within_BGRQP(), current.scores_BGQP()
    dwithin = torch.einsum("bqgrh,bpgrh->bgrqp", dy, u).mul_(within)  # times within: the gradient of log(within), and of scores
    dscores_BGQP = dwithin.sum(2)
    du = torch.einsum("bgrqp,bqgrh->bpgrh", within.mul_(scores.unsqueeze(2)), dy)
    dlog_BGRQP = dwithin.mul_(scores.unsqueeze(2))
    dlog = (dlog_BGRQP.sum(4) - dlog_BGRQP.sum(3)).permute(0, 3, 1, 2).contiguous()
    db = torch.einsum("bgqp,bqgk->bpgk", dscores_BGQP, current.c_BQGK)
    dc = torch.einsum("bgqp,bpgk->bqgk", dscores_BGQP, current.b_BQGK)

    dy = dy * current.from_start_BQGR.unsqueeze(-1)  # gradients through the state before the chunk
    dc += torch.einsum("bqgrh,bgrhk->bqgk", dy, state)
    dlog += (dy * torch.einsum("bqgk,bgrhk->bqgrh", current.c_BQGK, state)).sum(-1)
    dstate_before = torch.einsum("bqgrh,bqgk->bgrhk", dy, current.c_BQGK)

    kept = u * current.to_end_BQGR.unsqueeze(-1)  # gradients through the state after it
    from_next = torch.einsum("bqgk,bgrhk->bqgrh", current.b_BQGK, dnext)
    db += torch.einsum("bqgrh,bgrhk->bqgk", kept, dnext)
    slope_BQGR = (kept * from_next).sum(-1)
    dlog -= slope_BQGR
    dlog[:, -1] += slope_BQGR.sum(1) + current.across_BGR * (dnext * state).sum((3, 4))
    du.addcmul_(from_next, current.to_end_BQGR.unsqueeze(-1))
    dstate_before.addcmul_(dnext, current.across_BGR[..., None, None])
    return du, db, dc, dlog, dstate_before


def _skip_gradient(x: Tensor, dy: Tensor | None, d: Tensor) -> Tensor:
    if dy is None:
        return torch.zeros(d.shape, dtype=d.dtype, device=d.device)
    wide = _wide(x, dy, d)
    return torch.einsum("bsnh,bsnh->n", x.to(wide), dy.to(wide)).to(d.dtype)


_OPERANDS = "b s (g r) h, b s (g r), (g r), b s g k, b s g k, (g r), b (g r) h k, b s"
ssd_scan_p.def_sharding(f"{_OPERANDS} -> b s (g r) h, b (g r) h k", need_replication="s h k")
ssd_scan_p.bwd.def_sharding(
    f"{_OPERANDS}, b s (g r) h, b (g r) h k -> b s (g r) h, b s (g r), (g r), b s g k, b s g k, (g r), b (g r) h k",
    need_replication="s h k",
)
ssd_scan_p.def_batching_folded()
ssd_scan_p.bwd.def_batching_loop()  # the gradients of a and d sum over dim 0, so that the batch cannot be folded into it


@ssd_scan_p.def_cost
def _cost(x, dt, a, b, c, d, state, documents, *, chunk):
    (B, S, N, H), (G, K), Q = x.shape, b.shape[2:], min(chunk, x.shape[1])
    size = _wide(x, dt, a, b, c, d, state).itemsize
    flops = 2 * B * S * (G * Q * K + N * Q * H + 2 * N * H * K)
    workspace = size * B * (Q * Q * (2 * N + G) + Q * (6 * N * H + 3 * G * K) + 3 * N * H * K)
    return Cost(flops=flops, bytes=2 * x.nbytes + dt.nbytes + b.nbytes + c.nbytes + B * N * H * K * size, workspace=workspace)


@ssd_scan_p.bwd.def_cost
def _cost_bwd(x, dt, a, b, c, d, state, documents, dy, dfinal, *, chunk):
    (B, S, N, H), (G, K), Q = x.shape, b.shape[2:], min(chunk, x.shape[1])
    size = _wide(x, dt, a, b, c, d, state).itemsize
    flops = 2 * B * S * (3 * G * Q * K + 2 * N * Q * H + 6 * N * H * K)
    states = -(-S // max(Q, 1)) * N * H * K
    workspace = size * B * (Q * Q * (3 * N + 2 * G) + Q * (10 * N * H + 6 * G * K) + states + 3 * N * H * K)
    return Cost(flops=flops, bytes=3 * x.nbytes + 2 * (dt.nbytes + b.nbytes + c.nbytes), workspace=workspace)
