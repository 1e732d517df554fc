"""Latent attention to latents that earlier steps have written into the pages of a cache; keys and values are never made."""

from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.models.layers._cache import CacheSizes
from mpar.models.layers._latent_attention import (
    LatentAttention,
    LatentAttentionConfig,
    latent_merged,
    latent_queries,
    latent_scale,
    latents,
)
from mpar.models.layers._sizes import Sizes
from mpar.tree import Leaf, struct

__all__ = ["LATENT_PAGES_AXES", "LatentPages", "latent_attend_pages", "latent_pages_shapes"]


@struct
class LatentPages(Generic[Leaf]):
    """The latents of all rows, each followed by the part of the key with RoPE, as the features of one kv head. P: places."""

    latent_BP1C: Leaf


POOL: Axes = ("batch", "pages", None, None)
LATENT_PAGES_AXES: LatentPages[Axes] = LatentPages(POOL)


def latent_pages_shapes(config: LatentAttentionConfig, sizes: CacheSizes) -> LatentPages[Sizes]:
    """The cache of one layer with a tuple of sizes for each leaf."""
    return LatentPages((sizes.groups, sizes.places, 1, config.kv_rank + config.rope_size))


def latent_attend_pages(
    params: LatentAttention[Tensor],
    config: LatentAttentionConfig,
    x_BTD: Tensor,
    context: Mapping[str, Tensor],
    cache: LatentPages[Tensor],
    sizes: CacheSizes,
) -> tuple[Tensor, LatentPages[Tensor]]:
    """`latent_attend` for tokens whose earlier ones are in the cache, and the cache with the latents of these tokens.

    As in `decode_latent_attention`, heads attend to latents. What they mix are the keys themselves, of which the part with RoPE
    is then left out. For the context see `attend_pages`.
    """
    q_nope_BTNH, q_rope_BTNH = latent_queries(params, config, x_BTD, context)
    new_BTC = torch.cat(latents(params, config, x_BTD, context), -1).to(cache.latent_BP1C.dtype)
    new_BT1C = ops.constrain(new_BTC[:, :, None], ("batch", None, None, None))
    pool_BP1C = ops.constrain(ops.write_rows(cache.latent_BP1C, new_BT1C, context["places"]), POOL)
    up_CNH, out_CNH = params.kv_b_CNH.split([config.nope_size, config.v_size], -1)
    q_BTNC = torch.cat([ops.einsum("bsnh,cnh->bsnc", q_nope_BTNH, up_CNH), q_rope_BTNH], -1)
    mixed_BTNC = ops.paged_attention(
        ops.constrain(q_BTNC.to(pool_BP1C.dtype), ("batch", None, "heads", None)),
        pool_BP1C,
        pool_BP1C,
        context["documents"],
        context["positions"],
        context["pages"],
        page_size=sizes.page_size,
        scale=latent_scale(config),
    )
    out_BTNH = ops.einsum("bsnc,cnh->bsnh", mixed_BTNC[..., : config.kv_rank].to(x_BTD.dtype), out_CNH)
    out_BTNH = ops.constrain(out_BTNH, ("batch", "seq", "heads", "head"))
    return latent_merged(params, out_BTNH), LatentPages(pool_BP1C)
