"""Mixture of experts: 128 experts of which a token takes 8, as Qwen3-30B-A3B has them, and 256 in groups, as DeepSeek-V3."""

from typing import Any

import torch
from torch import Tensor

from mpar.kernels import implementation
from mpar.kernels._grouped_matmul import zero_rest
from mpar.kernels._launch import launch, tuned
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import GROUPED_MATMUL, PERMUTE

T, K, D, E = PERMUTE.dims("TkDE")
R, F = GROUPED_MATMUL.dims("RF")  # R = T * K rows of tokens, one for each expert that a token takes
BY_SOFTMAX = {"k": K, "score": "softmax", "normalise": True, "order": "pre", "groups": 1, "groups_kept": 1} | {
    "group_best": 2,
    "scale": 1.0,
}
BY_GROUPS = BY_SOFTMAX | {"score": "sigmoid", "groups": 8, "groups_kept": 4, "scale": 2.5}
SCALARS = "a program reads and writes a few numbers per token"
BF16, FP32 = torch.bfloat16, torch.float32


def _integers(make: Make, *shape: int) -> Tensor:
    """Integers for operands on whose values the work of a kernel does not depend: without data, or on a GPU zeros."""
    return make(shape, FP32).zero_().to(torch.int32)


def _places(make: Make) -> Tensor:
    """The row of each of the K copies of every token, (T, K); each row occurs once."""
    return make((R,), FP32).argsort().to(torch.int32).view(T, K)


def _call(primitive: str, *operands: Any, **params: Any) -> object:
    return implementation(primitive, "triton")(*operands, **params)


def _router(make: Make, num_experts: int, **params: Any) -> object:
    bias = make((num_experts,), FP32) if params["groups"] > 1 else None
    return _call("topk_router", make((T, num_experts), BF16), bias, **params)


def _router_bwd(make: Make, num_experts: int, **params: Any) -> object:
    scores, weights = make((T, num_experts), FP32), make((T, K), FP32)
    return _call("topk_router_bwd", make((T, num_experts), BF16), _integers(make, T, K), scores, weights, scores, **params)


def _ends(make: Make) -> Tensor:
    """The ends of the groups: 128 of 1024 rows each."""
    return _integers(make, E).add_(R // E).cumsum(0).to(torch.int32)


def _grouped(make: Make, dtype: torch.dtype, transposed: bool) -> object:
    w = make((E, F, D), dtype).transpose(1, 2) if transposed else make((E, D, F), dtype)
    return _call("grouped_matmul", make((R, D), dtype), w, _ends(make))


def _launch_rest(y: Tensor, ends: Tensor) -> None:
    entry = tuned("grouped_matmul_rest", y)
    launch(zero_rest, (132,), y, ends, *y.shape, on=y, tuning=entry, LAST=E - 1)


def _routing(name: str, kernel: str, num_experts: int, **params: Any) -> Case:
    run = _router_bwd if kernel == "topk_router_bwd" else _router
    return Case(name, (kernel,), lambda make: run(make, num_experts, **params), scalar_loads=SCALARS)


BY_CHOSEN_LOGITS = BY_SOFTMAX | {"order": "post"}
CASES = [
    _routing("topk_router 8 of 128", "topk_router_fwd", E, **BY_SOFTMAX),
    _routing("topk_router_bwd 8 of 128", "topk_router_bwd", E, **BY_SOFTMAX),
    _routing("topk_router 8 of 64, by chosen logits", "topk_router_fwd", 64, **BY_CHOSEN_LOGITS),
    _routing("topk_router_bwd 8 of 64, by chosen logits", "topk_router_bwd", 64, **BY_CHOSEN_LOGITS),
    *(_routing(f"topk_router 8 of {n}, 4 of 8 groups", "topk_router_fwd", n, **BY_GROUPS) for n in (256, 512, 1024)),
    *(_routing(f"topk_router_bwd 8 of {n}", "topk_router_bwd", n, **BY_GROUPS) for n in (256, 512, 1024)),
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
            lambda make, dtype=dtype: _call("permute", make((T, D), dtype), _places(make)),
        )
        for dtype in (BF16, FP32)
    ),
    Case(
        "unpermute weighted bfloat16",
        ("unpermute",),
        lambda make: _call("unpermute", make((R, D), BF16), _places(make), make((T, K), FP32)),
    ),
    Case(
        "unpermute bfloat16",
        ("unpermute",),
        lambda make: _call("unpermute", make((R, D), BF16), _places(make), None),
    ),
    Case(
        "unpermute_bwd bfloat16",
        ("unpermute_bwd",),
        lambda make: _call("unpermute_bwd", make((R, D), BF16), _places(make), make((T, K), FP32), make((T, D), BF16)),
        scalar_loads="place and weight of each of K rows are numbers of their own",
    ),
    *(
        Case(
            f"grouped_matmul {name} {str(dtype).removeprefix('torch.')}",
            ("grouped_matmul", "grouped_matmul_tiles"),
            lambda make, dtype=dtype, transposed=transposed: _grouped(make, dtype, transposed),
            matrix=dtype != FP32,
            tma=True,
        )
        for dtype in (BF16, torch.float16, FP32)
        for name, transposed in (("forward", False), ("transposed", True))
    ),
    *(
        Case(
            f"grouped_matmul_dw {str(dtype).removeprefix('torch.')}",
            ("grouped_matmul_dw",),
            lambda make, dtype=dtype: _call("grouped_matmul_dw", make((R, D), dtype), make((R, F), dtype), _ends(make)),
            matrix=dtype != FP32,
            tma=True,
        )
        for dtype in (BF16, torch.float16, FP32)
    ),
    Case(
        "grouped_matmul by torch, rows of no expert",
        ("grouped_matmul_rest",),
        lambda make: _launch_rest(make((R, F), BF16), _ends(make)),
    ),
]
