"""Attention: softmax(q k^T * scale) v over the visible keys, with grouped kv heads and a differentiable log-sum-exp.

Vaswani et al. 2017, arXiv:1706.03762, eq. 1; groups of query heads that share a kv head: Ainslie et al. 2023, arXiv:2305.13245.
Soft caps of scores: Gemma 2, arXiv:2408.00118, section 2. Sinks, a learned score of each head without a value: gpt-oss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.op_shape import AttentionShape
from mpar.ops.primitive import Cost, Primitive
from mpar.ops.sequence import _attention_blocks
from mpar.ops.sequence._attention_ring import attend_on_rank, attend_on_rank_bwd, ring, ring_bwd

__all__ = ["attention", "attention_p", "with_sinks"]

attention_p = Primitive(
    "attention",
    "q, k, v, q_order?, k_order?, q_documents?, k_documents?, sinks? -> out, lse",
    causal="bool",
    window="int?",
    scale="float",
    soft_cap="float?",
)


def attention(
    q_BSNH: Tensor,
    k_BMKH: Tensor,
    v_BMKH: Tensor,
    *,
    q_order: Tensor | None = None,
    k_order: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out_BSNH, lse_BSN)`: each query's average of the values it sees, and the log of its sum of exponentials.

    Query head n reads kv head n // (N / K). Query i sees key j iff all of these hold:
    - not `causal`, or `k_order[j] <= q_order[i]`;
    - `window` is None, or `q_order[i] - k_order[j] < window`;
    - their documents are equal and not -1, where documents are given (both or neither).
    Orders are integers (S,) and (M,), documents (B, S) and (B, M); orders default to 0, 1, 2, ... `scale` defaults to H**-0.5.
    With `soft_cap` a score becomes soft_cap * tanh(score / soft_cap), after the scale. `sinks` (N,) has for each head the score
    of one more key, which every query sees and whose value is zero: it counts in `lse` and makes `out` smaller.
    The head size of v, which is that of `out`, may differ from that of q and k. For a query that sees no key, out is 0, lse is
    -inf (or its sink), and the gradient is 0. `lse` is float32 or wider, natural log. Orders and documents have no gradient.
    Raises ShapeError or DtypeError if the operands do not fit each other, ConfigError if `window` or `soft_cap` is not positive.
    """
    scale = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
    return attention_p.bind(
        q_BSNH,
        k_BMKH,
        v_BMKH,
        q_order,
        k_order,
        q_documents,
        k_documents,
        sinks,
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )


@attention_p.def_abstract
def _abstract(q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap):
    shapes = f"attention of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"{shapes}: they must be (B, S, N, H), (B, M, K, H), (B, M, K, H)")
    (B, S, N, H), (M, K) = q.shape, k.shape[1:3]
    problems = []
    if k.shape[0] != B or k.shape[3] != H:
        problems.append(f"k must be ({B}, M, K, {H}) to fit q")
    if v.shape[:3] != k.shape[:3]:
        problems.append(f"v must be {tuple(k.shape[:3])} and a head size, to fit k")
    if not K or N % K:
        problems.append(f"{K} kv heads do not divide {N} query heads")
    if (q_documents is None) != (k_documents is None):
        problems.append("q_documents and k_documents must be given both or neither")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "q_order": (q_order, (S,)),
        "k_order": (k_order, (M,)),
        "q_documents": (q_documents, (B, S)),
        "k_documents": (k_documents, (B, M)),
        "sinks": (sinks, (N,)),
    }
    given = {name: (x, shape) for name, (x, shape) in expected.items() if x is not None}
    problems += [f"{name} is {tuple(x.shape)}, must be {shape}" for name, (x, shape) in given.items() if tuple(x.shape) != shape]
    if problems:
        raise ShapeError(f"{shapes}:\n" + "\n".join(problems))
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"{shapes}: dtypes are {q.dtype}, {k.dtype}, {v.dtype}; all three must have the same floating dtype")
    if sinks is not None and not sinks.is_floating_point():
        raise DtypeError(f"{shapes}: sinks are scores and must be floating, not {sinks.dtype}")
    wrong = {name: x.dtype for name, (x, _) in given.items() if name != "sinks" and x.dtype not in (torch.int32, torch.int64)}
    if wrong:
        raise DtypeError(f"{shapes}: orders and documents must be int32 or int64, not {wrong}")
    if window is not None and window < 1:
        raise ConfigError(f"{shapes}: window is {window}, must be a positive number of positions or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(f"{shapes}: soft_cap is {soft_cap}, must be a positive bound of scores or None")
    lse = torch.empty((B, S, N), dtype=_wide(q), device=q.device)
    return torch.empty((B, S, N, v.shape[3]), dtype=q.dtype, device=q.device), lse


@attention_p.def_impl
def _impl(q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap):
    masks = (q_order, k_order, q_documents, k_documents)
    if not q.numel() or not k.numel():
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=_wide(q))
    elif q.device.type != "cpu" or soft_cap is not None:
        out, lse = _plain(q, k, v, _visible(q, k, *masks, causal, window), scale, soft_cap)
    else:
        size = max(q.shape[3], v.shape[3])
        q1, k1, v1 = (_heads_first(x, size) for x in (q, k, v))
        out, lse = _attention_blocks.forward(q1, k1, v1, _attention_blocks.Masks(*masks, causal, window), scale)
        out, lse = out.transpose(1, 2)[..., : v.shape[3]].contiguous(), lse.transpose(1, 2).contiguous()
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


@attention_p.def_vjp("q, k, v, q_order, k_order, q_documents, k_documents, sinks, out, lse, dout, dlse -> dq, dk, dv, dsinks")
def _vjp(q, k, v, q_order, k_order, q_documents, k_documents, sinks, out, lse, dout, dlse, *, causal, window, scale, soft_cap):
    """dscore = p (dout . v - dout . out + dlse), with p = exp(score - lse). A sink is a score whose v is zero."""
    masks = (q_order, k_order, q_documents, k_documents)
    sees_nothing = lse == -torch.inf
    lse = lse.masked_fill(sees_nothing, torch.inf)  # then exp(score - lse) is 0 for queries that see nothing
    dlse = None if dlse is None else dlse.masked_fill(sees_nothing, 0.0)
    dout = torch.zeros_like(out) if dout is None else dout
    dsinks = q.new_empty(0) if sinks is None else _sinks_backward(sinks, out, lse, dout, dlse)
    if not q.numel() or not k.numel():
        return *(x.new_zeros(x.shape) for x in (q, k, v)), dsinks
    if q.device.type != "cpu" or soft_cap is not None:
        visible = _visible(q, k, *masks, causal, window)
        return *_plain_backward(q, k, v, visible, out, lse, dout, dlse, scale, soft_cap), dsinks
    # The kernel computes dscore = p * (dout . v - dout . out). An extra feature with dout 1, v 0 and out -dlse adds p * dlse.
    size = max(q.shape[3], v.shape[3]) + (dlse is not None)
    q1, k1, v1, out1, dout1 = (_heads_first(x, size) for x in (q, k, v, out, dout))
    if dlse is not None:
        dout1[..., -1] = 1.0
        out1[..., -1] = -dlse.transpose(1, 2)
    block_masks = _attention_blocks.Masks(*masks, causal, window)
    grads = _attention_blocks.backward(dout1, q1, k1, v1, out1, lse.transpose(1, 2), block_masks, scale)
    unpadded = (grad.transpose(1, 2)[..., : x.shape[3]].contiguous() for grad, x in zip(grads, (q, k, v), strict=True))
    return *unpadded, dsinks


@attention_p.def_formula
def _formula(q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap):
    """The scores of all pairs are in memory at once. A query that sees no key is given all keys for a while, so that no number is
    NaN.
    """
    wide, heads = _wide(q), (k.shape[2], -1)
    scores_BKGSM = torch.einsum("bskgh,bmkh->bkgsm", q.to(wide).unflatten(2, heads), k.to(wide)) * scale
    if soft_cap is not None:
        scores_BKGSM = soft_cap * torch.tanh(scores_BKGSM / soft_cap)
    visible_B11SM = _visible(q, k, q_order, k_order, q_documents, k_documents, causal, window)[:, None, None]
    if sinks is not None:
        one_more = sinks.to(wide).unflatten(0, heads)[..., None, None].expand(*scores_BKGSM.shape[:-1], 1)
        scores_BKGSM = torch.cat([scores_BKGSM, one_more], -1)
        visible_B11SM = F.pad(visible_B11SM, (0, 1), value=True)
    nothing = ~visible_B11SM.any(-1)
    hidden = scores_BKGSM.masked_fill(~(visible_B11SM | nothing[..., None]), -torch.inf)
    p_BKGSM = torch.softmax(hidden, -1).masked_fill(nothing[..., None], 0.0)[..., : k.shape[1]]
    lse_BKGS = torch.logsumexp(hidden, -1).masked_fill(nothing, -torch.inf)
    out_BSNH = torch.einsum("bkgsm,bmkh->bskgh", p_BKGSM, v.to(wide)).flatten(2, 3).to(q.dtype)
    return out_BSNH, lse_BKGS.flatten(1, 2).transpose(1, 2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results with one more key, of zero value, in the softmax."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    share = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return (out * share.unsqueeze(-1)).to(out.dtype), total


def _sinks_backward(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    dscores = -(dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if dlse is not None:
        dscores += dlse
    return dscores.mul_(torch.exp(sinks.to(lse.dtype) - lse)).sum((0, 1)).to(sinks.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _visible(q, k, q_order, k_order, q_documents, k_documents, causal, window) -> Tensor:
    """Which query sees which key, (B or 1, S, M)."""
    q_order = torch.arange(q.shape[1], device=q.device) if q_order is None else q_order
    k_order = torch.arange(k.shape[1], device=q.device) if k_order is None else k_order
    return _attention_blocks.visible(q_order, k_order, q_documents, k_documents, causal, window)


def _heads_first(x: Tensor, size: int) -> Tensor:
    """(B, S, N, H) as (B, N, S, `size`), with zeros for missing features."""
    if x.shape[3] < size:
        x = F.pad(x, (0, size - x.shape[3]))
    return (x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2)


def _plain(q, k, v, visible, scale, soft_cap=None) -> tuple[Tensor, Tensor]:
    """The plain formulas, for one row of the batch at a time; the scores of all pairs of a row are in memory at once."""
    rows = []
    for i in range(q.shape[0]):
        scores_KGSM = _scores(q[i], k[i], scale, soft_cap).masked_fill_(~visible[i % visible.shape[0]], -torch.inf)
        lse_KGS = torch.logsumexp(scores_KGSM, -1)
        p_KGSM = _probabilities(scores_KGSM, lse_KGS.masked_fill(lse_KGS == -torch.inf, torch.inf))
        out_SKGH = torch.einsum("kgsm,mkh->skgh", p_KGSM, v[i].to(p_KGSM.dtype))
        rows.append((out_SKGH.flatten(1, 2).to(q.dtype), lse_KGS.flatten(0, 1).T))
    outs, lses = zip(*rows, strict=True)
    return torch.stack(outs), torch.stack(lses)


def _plain_backward(q, k, v, visible, out, lse, dout, dlse, scale, soft_cap=None) -> tuple[Tensor, Tensor, Tensor]:
    K, wide = k.shape[2], _wide(q)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for i in range(q.shape[0]):
        scores_KGSM = _scores(q[i], k[i], scale, soft_cap)
        slope_KGSM = None if soft_cap is None else 1 - (scores_KGSM / soft_cap).square_()
        scores_KGSM.masked_fill_(~visible[i % visible.shape[0]], -torch.inf)
        p_KGSM = _probabilities(scores_KGSM, lse[i].T.unflatten(0, (K, -1)))
        dout_SKGH, out_SKGH = (x[i].to(wide).unflatten(1, (K, -1)) for x in (dout, out))
        delta_SKG = (dout_SKGH * out_SKGH).sum(-1)
        if dlse is not None:
            delta_SKG -= dlse[i].unflatten(1, (K, -1))
        dp_KGSM = torch.einsum("skgh,mkh->kgsm", dout_SKGH, v[i].to(wide))
        dscores_KGSM = dp_KGSM.sub_(delta_SKG.permute(1, 2, 0).unsqueeze(-1)).mul_(p_KGSM).mul_(scale)
        if slope_KGSM is not None:
            dscores_KGSM.mul_(slope_KGSM)
        dq[i] = torch.einsum("kgsm,mkh->skgh", dscores_KGSM, k[i].to(wide)).flatten(1, 2)
        dk[i] = torch.einsum("kgsm,skgh->mkh", dscores_KGSM, q[i].to(wide).unflatten(1, (K, -1)))
        dv[i] = torch.einsum("kgsm,skgh->mkh", p_KGSM, dout_SKGH)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """Scores of all pairs of one batch row, (K, G, S, M)."""
    q, k = q.to(_wide(q)).unflatten(1, (k.shape[1], -1)), k.to(_wide(k))
    scores_KGSM = torch.einsum("skgh,mkh->kgsm", q, k).mul_(scale)
    return scores_KGSM if soft_cap is None else scores_KGSM.div_(soft_cap).tanh_().mul_(soft_cap)


def _probabilities(scores_KGSM: Tensor, lse_KGS: Tensor) -> Tensor:
    return scores_KGSM.sub_(lse_KGS.unsqueeze(-1)).exp_()


attention_p.def_sharding(
    "b s (k g) h, b m k h, b m k h', s, m, b s, b m, (k g) -> b s (k g) h', b s (k g)",
    need_replication="s m h h'",
    follows="m:s",
)
attention_p.bwd.def_sharding(
    "b s (k g) h, b m k h, b m k h', s, m, b s, b m, (k g), b s (k g) h', b s (k g), b s (k g) h', b s (k g)"
    " -> b s (k g) h, b m k h, b m k h', (k g)",
    need_replication="s m h h'",
    follows="m:s",
)
attention_p.def_sharded("m")(ring(attention_p))
attention_p.def_sharded("s")(attend_on_rank(attention_p))
attention_p.bwd.def_sharded("m")(ring_bwd(attention_p.bwd))
attention_p.bwd.def_sharded("s")(attend_on_rank_bwd(attention_p.bwd))
attention_p.def_batching_folded()
attention_p.bwd.def_batching_loop()  # the gradient of sinks sums over dim 0, so that the batch cannot be folded into it


@attention_p.def_cost
def _cost(q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap):
    out_bytes = q.shape[:3].numel() * v.shape[3] * q.element_size()
    flops = 2 * _pairs(q, k, causal) * (q.shape[3] + v.shape[3])
    padded = 0 if q.shape[3] == v.shape[3] else q.nbytes + k.nbytes + v.nbytes + out_bytes
    workspace = padded + _mask_bytes(q, k, q_order, k_order, q_documents, window, soft_cap) + _score_bytes(q, k, soft_cap)
    if not q_order is k_order is q_documents is window is None:  # blocks are merged: their sum, one block, a wide copy of it
        workspace += 3 * q.shape[:3].numel() * (max(q.shape[3], v.shape[3]) + 2) * _wide(q).itemsize
    shape = AttentionShape(q.shape[3], k.shape[1], causal, backward=False)
    return Cost(flops=flops, bytes=q.nbytes + k.nbytes + v.nbytes + out_bytes, workspace=workspace, attention=shape)


@attention_p.bwd.def_cost
def _cost_bwd(
    q, k, v, q_order, k_order, q_documents, k_documents, sinks, out, lse, dout, dlse, *, causal, window, scale, soft_cap
):
    moved = 2 * (q.nbytes + k.nbytes + v.nbytes + out.nbytes)
    flops = 2 * _pairs(q, k, causal) * (3 * q.shape[3] + 2 * v.shape[3])
    padded = 0 if dlse is None and q.shape[3] == v.shape[3] else moved
    masks = _mask_bytes(q, k, q_order, k_order, q_documents, window, soft_cap)
    workspace = padded + masks + 2 * _score_bytes(q, k, soft_cap)
    if not q_order is k_order is q_documents is window is None:  # gradients are summed over blocks
        elements = (q.shape[:3].numel() + 2 * k.shape[:3].numel()) * (max(q.shape[3], v.shape[3]) + 1)
        workspace += elements * (_wide(q).itemsize + 2 * q.element_size())
    shape = AttentionShape(q.shape[3], k.shape[1], causal, backward=True)
    return Cost(flops=flops, bytes=moved, workspace=workspace, attention=shape)


def _pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many pairs of a query head and a key are computed: half of all if causal."""
    return q.shape[:3].numel() * k.shape[1] // (2 if causal else 1)


def _mask_bytes(q, k, q_order, k_order, q_documents, window: int | None, soft_cap: float | None) -> int:
    """Bytes of the largest mask, 0 if none is made: distances, booleans, and a bias in the dtype of `q`."""
    if q_order is k_order is q_documents is window is None:
        return 0
    rows, keys = q.shape[1], k.shape[1]
    if soft_cap is None:  # masks are made by blocks; with a window and nothing else, only for the edges of its band
        only_window = q_order is k_order is q_documents is None
        rows = min(rows, _attention_blocks.ROWS if only_window else _attention_blocks.mask_rows(keys))
        keys = min(keys, _attention_blocks.ROWS) if only_window else keys
    return rows * keys * (8 + (1 if q_documents is None else q.shape[0]) * (3 + q.element_size()))


def _score_bytes(q: Tensor, k: Tensor, soft_cap: float | None) -> int:
    """Bytes of the scores of one row of the batch, which the plain formulas have in memory at once."""
    return 0 if soft_cap is None else q.shape[1:3].numel() * k.shape[1] * _wide(q).itemsize


attention_p.opaque = attention_p.bwd.opaque = True  # blocks follow from documents and positions, which are read on the host
