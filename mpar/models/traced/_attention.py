"""Attention of a traced model: transformers calls it through a table of functions, in which mpar's primitive has a name."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar import ops
from mpar.chain import Axes, of_past
from mpar.errors import ConfigError
from mpar.models.traced._reading import Keys, Reading, current, running

__all__ = ["ATTENTION", "carried_axes", "dot_product_attention", "register_attention"]

ATTENTION = "mpar"
"""The name of the function in transformers' table."""

_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"}
_WITHOUT_EFFECT = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
_WITHOUT_EFFECT |= {"position_embeddings", "output_hidden_states", "return_dict"}
_QUERIES: Axes = ("batch", "attend_seq", "attend_heads", "head")
_RESULT: Axes = ("batch", "seq", "heads", "head")


def carried_axes(num_kv_heads: int) -> Keys[Axes]:
    """The logical axes of what a call of attention carries to later slices; along the row it stays sharded as queries are."""
    axes = _keys_axes("attend_seq", num_kv_heads)
    return Keys(axes, axes)


def _keys_axes(rows: str, num_kv_heads: int) -> Axes:
    """A single head is read by all heads of queries, so every rank has it."""
    return ("batch", rows, None if num_kv_heads == 1 else "attend_kv_heads", "head")


def register_attention(transformers: ModuleType) -> None:
    """Enter mpar's attention in transformers' table."""
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
    """What transformers calls: heads come before positions; in the result positions come first."""
    strange = sorted(k for k, v in options.items() if v is not None and k not in _UNDERSTOOD | _WITHOUT_EFFECT)
    if attention_mask is not None or strange or options.get("is_causal") is False:
        what = strange or ("a mask of its own" if attention_mask is not None else "no causal mask")
        raise ConfigError(f"{type(module).__name__} calls attention with {what}, which mpar's primitive has not")
    q_BSNH, k_BSKH, v_BSKH = (x.transpose(1, 2) for x in (query, key, value))
    how = {"window": options.get("sliding_window"), "scale": options.get("scaling"), "soft_cap": options.get("softcap")}
    return _by_primitive(current(module), q_BSNH, Keys(k_BSKH, v_BSKH), options.get("s_aux"), how), None


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name, (B, N, S, H) to (B, N, S, H).

    Within a layer it is the primitive, if causal attention alone is asked for.
    """
    found = running()
    plain = is_causal and attn_mask is None and not dropout_p and query.ndim == 4 and query.shape[2] == key.shape[2]
    if found is None or not plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q_BSNH, k_BSKH, v_BSKH = (x.transpose(1, 2) for x in (query, key, value))
    return _by_primitive(found, q_BSNH, Keys(k_BSKH, v_BSKH), None, {"scale": scale, "window": None}).transpose(1, 2)


def _by_primitive(found: Reading, q_BSNH: Tensor, keys: Keys[Tensor], sinks: Tensor | None, how: dict[str, Any]) -> Tensor:
    apply, dtype = _in_rows if found.state is None else _after_state, keys.v_BMKH.dtype
    # a rotation by a table of float32 may have made queries and keys wider
    q_BSNH, keys = q_BSNH.to(dtype), Keys(keys.k_BMKH.to(dtype), keys.v_BMKH)
    return ops.constrain(apply(found, ops.constrain(q_BSNH, _QUERIES), keys, sinks, how), _RESULT)


def _in_rows(found: Reading, q_BSNH: Tensor, keys: Keys[Tensor], sinks: Tensor | None, how: dict[str, Any]) -> Tensor:
    """Attention to the keys of the same positions and of earlier slices."""
    call, context, num_kv_heads = len(found.carried), found.context, keys.k_BMKH.shape[2]
    in_slice, read = (_keys_axes(rows, num_kv_heads) for rows in ("attend_seq", "attend_kv_seq"))
    carried = Keys(ops.constrain(keys.k_BMKH, in_slice), ops.constrain(keys.v_BMKH, in_slice))
    found.carried.append(carried)
    own, *past = (
        (ops.constrain(each.k_BMKH, read), ops.constrain(each.v_BMKH, read))
        for each in (carried, *(slice_keys[call] for slice_keys in found.past))
    )
    past_parts = [
        ops.KeyPart(*pair, context[of_past("order", i)], context.get(of_past("documents", i))) for i, pair in enumerate(past)
    ]
    own_part = ops.KeyPart(*own, context.get("order"), context.get("documents"))
    return ops.attention_parts(q_BSNH, own_part, past_parts, sinks_N=sinks, **how)


def _after_state(found: Reading, q_BSNH: Tensor, keys: Keys[Tensor], sinks: Tensor | None, how: dict[str, Any]) -> Tensor:
    """Attention to the keys so far and to new ones. Of these, `carried` gets those that the next token sees."""
    assert found.state is not None
    call, order = len(found.carried), found.context["order"]
    k_BMKH, v_BMKH, order_M = keys.k_BMKH, keys.v_BMKH, order
    if call < len(found.state):
        before = found.state[call]
        assert before.order_M is not None
        k_BMKH, v_BMKH = torch.cat([before.k_BMKH, k_BMKH], 1), torch.cat([before.v_BMKH, v_BMKH], 1)
        order_M = torch.cat([before.order_M, order])
    out_BSNH, _ = ops.attention(q_BSNH, k_BMKH, v_BMKH, q_order=order, k_order=order_M, sinks=sinks, causal=True, **how)
    first = 0 if how["window"] is None else max(0, order_M.shape[0] - how["window"] + 1)
    found.carried.append(Keys(k_BMKH[:, first:], v_BMKH[:, first:], order_M[first:]))
    return out_BSNH
