"""Attention of a traced model: transformers calls it through a table of functions, in which mpar's primitive has a name."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import Tensor

from mpar import ops
from mpar.errors import ConfigError

__all__ = ["ATTENTION", "READ", "register_attention"]

ATTENTION = "mpar"
"""The name of the function in transformers' table."""
READ: ContextVar[Mapping[str, Tensor] | None] = ContextVar("mpar_attention_reads", default=None)
"""What attention reads besides queries, keys and values while a segment runs: order and documents."""

_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"}
_WITHOUT_EFFECT = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
_WITHOUT_EFFECT |= {"position_embeddings", "output_hidden_states", "return_dict"}
_QUERIES = ("batch", "attend_seq", "attend_heads", "head")
_KEYS = ("batch", "attend_kv_seq", "attend_kv_heads", "head")
_RESULT = ("batch", "seq", "heads", "head")


def register_attention(transformers: ModuleType) -> None:
    """Enter mpar's attention in transformers' table."""
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
    """What transformers calls: heads come before positions; in the result positions come first."""
    strange = sorted(k for k, v in options.items() if v is not None and k not in _UNDERSTOOD | _WITHOUT_EFFECT)
    if attention_mask is not None or strange or options.get("is_causal") is False:
        what = strange or ("a mask of its own" if attention_mask is not None else "no causal mask")
        raise ConfigError(f"{type(module).__name__} calls attention with {what}, which mpar's primitive has not")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    read = READ.get() or {}
    out, _ = ops.attention(
        ops.constrain(q, _QUERIES),
        ops.constrain(k, _KEYS),
        ops.constrain(v, _KEYS),
        q_order=read.get("order"),
        k_order=read.get("order"),
        q_documents=read.get("documents"),
        k_documents=read.get("documents"),
        sinks=options.get("s_aux"),
        window=options.get("sliding_window"),
        scale=options.get("scaling"),
        soft_cap=options.get("softcap"),
    )
    return ops.constrain(out, _RESULT), None
