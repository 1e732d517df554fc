"""Mixture of experts: 128 experts of which a token takes 8, as Qwen3-30B-A3B has them, and 256 in groups, as DeepSeek-V3."""

from typing import Any

import torch
from torch import Tensor

from bench.kernels._case import Case, Make
from mpar.kernels import implementation

T, D, E, K = 16384, 2048, 128, 8
ROUTER = {"k": K, "score": "softmax", "normalise": True, "order": "pre", "groups": 1, "groups_kept": 1, "scale": 1.0}
GROUPED = ROUTER | {"score": "sigmoid", "groups": 8, "groups_kept": 4, "scale": 2.5}
SCALARS = "a program reads and writes a few numbers per token"
BF16, FP32 = torch.bfloat16, torch.float32


def _integers(make: Make, *shape: int) -> Tensor:
    """Whole numbers without data, or zeros on a GPU: what a kernel does does not depend on them."""
    return make(shape, FP32).zero_().to(torch.int32)


def _call(primitive: str, *operands: Any, **params: Any) -> object:
    return implementation(primitive, "triton")(*operands, **params)


def _router(make: Make, num_experts: int, **params: Any) -> object:
    bias = make((num_experts,), FP32) if params["groups"] > 1 else None
    return _call("topk_router", make((T, num_experts), BF16), bias, **params)


def _router_bwd(make: Make, num_experts: int, **params: Any) -> object:
    scores, weights = make((T, num_experts), FP32), make((T, K), FP32)
    return _call("topk_router_bwd", make((T, num_experts), BF16), _integers(make, T, K), scores, weights, scores, **params)


CASES = [
    Case("topk_router 8 of 128", ("topk_router_fwd",), lambda make: _router(make, E, **ROUTER), scalar_loads=SCALARS),
    Case("topk_router_bwd 8 of 128", ("topk_router_bwd",), lambda make: _router_bwd(make, E, **ROUTER), scalar_loads=SCALARS),
    Case(
        "topk_router 8 of 64, by chosen logits",
        ("topk_router_fwd",),
        lambda make: _router(make, 64, **ROUTER | {"order": "post"}),
        scalar_loads=SCALARS,
    ),
    Case(
        "topk_router_bwd 8 of 64, by chosen logits",
        ("topk_router_bwd",),
        lambda make: _router_bwd(make, 64, **ROUTER | {"order": "post"}),
        scalar_loads=SCALARS,
    ),
    *(
        Case(
            f"topk_router 8 of {n}, 4 of 8 groups",
            ("topk_router_fwd",),
            lambda make, n=n: _router(make, n, **GROUPED),
            scalar_loads=SCALARS,
        )
        for n in (256, 512, 1024)
    ),
    *(
        Case(
            f"topk_router_bwd 8 of {n}",
            ("topk_router_bwd",),
            lambda make, n=n: _router_bwd(make, n, **GROUPED),
            scalar_loads=SCALARS,
        )
        for n in (256, 512, 1024)
    ),
    *(
        Case(
            f"expert_order {n} experts",
            ("expert_order_count", "expert_order_scan", "expert_order_place"),
            lambda make, n=n: _call("expert_order", _integers(make, T, K), num_experts=n),
            scalar_loads="one number per slot, of 4 bytes",
        )
        for n in (8, E, 1024)
    ),
    *(
        Case(
            f"permute {str(dtype).removeprefix('torch.')}",
            ("permute",),
            lambda make, dtype=dtype: _call("permute", make((T, D), dtype), _integers(make, T, K)),
        )
        for dtype in (BF16, FP32)
    ),
    Case(
        "unpermute weighted bfloat16",
        ("unpermute",),
        lambda make: _call("unpermute", make((T * K, D), BF16), _integers(make, T, K), make((T, K), FP32)),
    ),
    Case(
        "unpermute bfloat16",
        ("unpermute",),
        lambda make: _call("unpermute", make((T * K, D), BF16), _integers(make, T, K), None),
    ),
    Case(
        "unpermute_bwd bfloat16",
        ("unpermute_bwd",),
        lambda make: _call(
            "unpermute_bwd", make((T * K, D), BF16), _integers(make, T, K), make((T, K), FP32), make((T, D), BF16)
        ),
    ),
]
