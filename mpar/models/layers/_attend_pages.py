"""Attention to keys and values that earlier steps have written into the pages of a cache."""

from collections.abc import Mapping
from typing import Generic

from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.models.layers._attention import Attention, AttentionConfig, merged, projected
from mpar.models.layers._cache import CacheSizes
from mpar.models.layers._sizes import Sizes
from mpar.tree import Leaf, struct

__all__ = ["ATTENTION_PAGES_AXES", "AttentionPages", "attend_pages", "attention_pages_shapes"]


@struct
class AttentionPages(Generic[Leaf]):
    """The keys (after RoPE) and values of all rows, at the places that the table of pages gives them. B: groups; P: places."""

    k_BPKH: Leaf
    v_BPKH: Leaf


POOL: Axes = ("batch", "pages", "kv_heads", "head")
ATTENTION_PAGES_AXES: AttentionPages[Axes] = AttentionPages(POOL, POOL)


def attention_pages_shapes(config: AttentionConfig, sizes: CacheSizes) -> AttentionPages[Sizes]:
    """The cache of one layer with a tuple of sizes for each leaf."""
    pool = (sizes.groups, sizes.places, config.num_kv_heads, config.head_size)
    return AttentionPages(pool, pool)


def attend_pages(
    params: Attention[Tensor],
    config: AttentionConfig,
    x_BTD: Tensor,
    context: Mapping[str, Tensor],
    cache: AttentionPages[Tensor],
    sizes: CacheSizes,
) -> tuple[Tensor, AttentionPages[Tensor]]:
    """`attend` for tokens whose earlier ones are in the cache, and the cache with the keys and values of these tokens.

    `context` has the RoPE tables at the positions of the tokens, and for each token its row ("documents"), its position in it
    ("positions") and the place of its keys ("places"); and the table of pages.
    """
    q_BTNH, k_BTKH, v_BTKH = projected(params, config, x_BTD, context)
    q_BTNH = ops.constrain(q_BTNH, ("batch", None, "heads", "head"))
    new = (ops.constrain(x.to(cache.k_BPKH.dtype), ("batch", None, "kv_heads", "head")) for x in (k_BTKH, v_BTKH))
    pools = zip((cache.k_BPKH, cache.v_BPKH), new, strict=True)
    k_BPKH, v_BPKH = (ops.constrain(ops.write_rows(pool, rows, context["places"]), POOL) for pool, rows in pools)
    out_BTNH = ops.paged_attention(
        q_BTNH.to(k_BPKH.dtype),
        k_BPKH,
        v_BPKH,
        context["documents"],
        context["positions"],
        context["pages"],
        page_size=sizes.page_size,
        sinks=params.sinks_N,
        window=config.window,
        scale=config.scale,
        soft_cap=config.soft_cap,
    )
    out_BTNH = ops.constrain(out_BTNH.to(q_BTNH.dtype), ("batch", "seq", "heads", "head"))
    return merged(params, out_BTNH), AttentionPages(k_BPKH, v_BPKH)
