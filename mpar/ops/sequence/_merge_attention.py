"""Merge of attention over two sets of keys into attention over both, by their log-sum-exps, as ring attention needs it.

Liu et al. 2023, arXiv:2310.01889, section 3 (blocks of keys in any order); Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["merge_attention"]

merge_attention_p = Primitive("merge_attention", "out_a, lse_a, out_b, lse_b -> out, lse")


def merge_attention(out_a_BSNH: Tensor, lse_a_BSN: Tensor, out_b_BSNH: Tensor, lse_b_BSN: Tensor) -> tuple[Tensor, Tensor]:
    """`(out_BSNH, lse_BSN)` of attention over two sets of keys together, from the results of `attention` for each set.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. A query that sees nothing in either
    set has lse -inf and out 0. It is computed in float32 or wider. `out` has the wider of the dtypes of `out_a` and `out_b`, so
    that merged results may be float32 while single ones are bfloat16; `lse` has the dtype of `lse_a`.
    Raises ShapeError if shapes differ, DtypeError if something is not floating or the dtypes of both lse differ.
    """
    return merge_attention_p.bind(out_a_BSNH, lse_a_BSN, out_b_BSNH, lse_b_BSN)


@merge_attention_p.def_abstract
def _abstract(out_a, lse_a, out_b, lse_b):
    shapes = (
        f"merge_attention of {tuple(out_a.shape)} with {tuple(lse_a.shape)}, and {tuple(out_b.shape)} with {tuple(lse_b.shape)}"
    )
    if out_a.ndim != 4 or out_a.shape != out_b.shape or not lse_a.shape == lse_b.shape == out_a.shape[:3]:
        raise ShapeError(f"{shapes}: they must be (B, S, N, H), (B, S, N) and the same again")
    dtypes = [x.dtype for x in (out_a, lse_a, out_b, lse_b)]
    if not all(dtype.is_floating_point for dtype in dtypes) or lse_a.dtype != lse_b.dtype:
        raise DtypeError(f"{shapes}: dtypes are {dtypes}; all must be floating, and both lse the same")
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    return torch.empty(out_a.shape, dtype=dtype, device=out_a.device), torch.empty_like(
        lse_a, memory_format=torch.contiguous_format
    )


@merge_attention_p.def_impl
def _impl(out_a, lse_a, out_b, lse_b):
    lse, share_a, share_b = _shares(lse_a, lse_b)
    out = share_a.unsqueeze(-1) * out_a + share_b.unsqueeze(-1) * out_b
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)).contiguous(), lse.to(lse_a.dtype).contiguous()


@merge_attention_p.def_vjp("out_a, lse_a, out_b, lse_b, dout, dlse -> dout_a, dlse_a, dout_b, dlse_b")
def _vjp(out_a, lse_a, out_b, lse_b, dout, dlse):
    """With the shares w of a and b:  dout_a = w_a dout,  dlse_a = w_a (dlse + w_b dout . (out_a - out_b)), and so for b."""
    _, share_a, share_b = _shares(lse_a, lse_b)
    dlse = torch.zeros_like(share_a) if dlse is None else dlse.to(share_a.dtype)
    if dout is None:
        grads = (torch.zeros_like(out_a), share_a * dlse, torch.zeros_like(out_b), share_b * dlse)
    else:
        dout = dout.to(share_a.dtype)
        slope = (dout * (out_a.to(dout.dtype) - out_b.to(dout.dtype))).sum(-1)
        dlse_a, dlse_b = share_a * (dlse + share_b * slope), share_b * (dlse - share_a * slope)
        grads = (share_a.unsqueeze(-1) * dout, dlse_a, share_b.unsqueeze(-1) * dout, dlse_b)
    dout_a, dlse_a, dout_b, dlse_b = grads
    dlse_a, dlse_b = dlse_a.masked_fill(share_a == 0, 0.0), dlse_b.masked_fill(share_b == 0, 0.0)  # dlse may not be finite there
    likes = (out_a, lse_a, out_b, lse_b)
    return tuple(grad.to(like.dtype).contiguous() for grad, like in zip((dout_a, dlse_a, dout_b, dlse_b), likes, strict=True))


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(lse of both, share of a, share of b)`, in float32 or wider; both shares are 0 where both log-sum-exps are -inf."""
    lse_a, lse_b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    level = lse.masked_fill(lse == -torch.inf, 0.0)
    return lse, torch.exp(lse_a - level), torch.exp(lse_b - level)


merge_attention_p.def_sharding("b s n h, b s n, b s n h, b s n -> b s n h, b s n", need_replication="h")
merge_attention_p.bwd.def_sharding(
    "b s n h, b s n, b s n h, b s n, b s n h, b s n -> b s n h, b s n, b s n h, b s n", need_replication="h"
)
merge_attention_p.def_batching_folded()
merge_attention_p.bwd.def_batching_folded()


@merge_attention_p.def_cost
def _cost(out_a, lse_a, out_b, lse_b):
    moved = out_a.nbytes + out_b.nbytes + max(out_a.nbytes, out_b.nbytes) + 3 * lse_a.nbytes
    return Cost(flops=3 * out_a.numel(), bytes=moved, workspace=3 * out_a.numel() * 4)


@merge_attention_p.bwd.def_cost
def _cost_bwd(out_a, lse_a, out_b, lse_b, dout, dlse):
    moved = 2 * (out_a.nbytes + out_b.nbytes) + max(out_a.nbytes, out_b.nbytes) + 5 * lse_a.nbytes
    return Cost(flops=5 * out_a.numel(), bytes=moved, workspace=4 * out_a.numel() * 4)
