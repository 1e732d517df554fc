"""Catalogue: which implementations a primitive has besides its reference, where each is found, and which calls it supports.

It does not import Triton, so that any machine can compile a program for any chip.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.kernels._attention_gluon_support import attention_gluon_supports
from mpar.kernels._attention_support import (
    attention_bwd_workspace,
    attention_supports,
    merge_supports,
    scores_bwd_workspace,
    scores_workspace,
)
from mpar.kernels._fp8_support import fp8_matmul_supports, quantise_both_workspace, quantise_supports, quantise_workspace
from mpar.kernels._head_chunks import backward_workspace, forward_workspace, grad_workspace
from mpar.kernels._moe_support import (
    expert_order_supports,
    expert_order_workspace,
    grouped_matmul_dw_workspace,
    grouped_matmul_supports,
    grouped_matmul_workspace,
    grouped_mm_supports,
    router_supports,
    rows_support,
)
from mpar.kernels._nf4_support import dequantise_nf4_supports
from mpar.kernels._paged_attention_support import paged_attention_supports, paged_attention_workspace

__all__ = ["CATALOGUE", "REFERENCE_WORKSPACE", "Implementation", "Supports", "floating", "no_workspace"]

Supports = Callable[..., str | None]
"""`supports(arch, *operands, **params)`: why the kernel cannot carry out this call; None if it can. Operands need no data."""


@dataclass(frozen=True)
class Implementation:
    """`function` of `module` carries out a primitive, with the operands, parameters and results of its `def_impl`.

    `workspace(*operands, **params)`: bytes that the function allocates and frees within a call.
    """

    name: str
    module: str
    function: str
    supports: Supports
    workspace: Callable[..., int] = lambda *operands, **params: 0

    def load(self) -> Callable[..., object]:
        """Import the module, which imports Triton, and return the function."""
        return getattr(importlib.import_module(self.module), self.function)


def floating(arch: str, *operands: Tensor | list[Tensor] | None, **_: object) -> str | None:
    """None if all floating operands are float32, float16 or bfloat16; else why not."""
    tensors = [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else [operand])]
    wrong = {x.dtype for x in tensors if x is not None and x.is_floating_point()} - {torch.float32, torch.float16, torch.bfloat16}
    return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}" if wrong else None


def rope_supports(arch: str, x: Tensor | list[Tensor], cos: Tensor, sin: Tensor, **params: object) -> str | None:
    """None if at most 256 pairs of features of a head are turned, and dtypes are as in `floating`; else why not."""
    if cos.shape[-1] > 256:
        return f"{2 * cos.shape[-1]} features of a head are turned: kernels hold at most 512"
    return floating(arch, x, cos, sin, **params)


def updates(
    arch: str,
    params: list[Tensor],
    grads: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    copies: list[Tensor],
    **_: object,
) -> str | None:
    """None if all tensors are on one device, parameters and moments are float32, gradients and copies are float32, bfloat16 or
    float16, and all copies have one dtype; else why not."""
    devices = {x.device for x in (*params, *grads, *ms, *vs, *copies, lr, step, scale, skip) if x is not None}
    if len(devices) > 1:
        return f"tensors are on {', '.join(sorted(map(str, devices)))}: a kernel reads one device"
    wide = {x.dtype for x in (*params, *ms, *vs)} - {torch.float32}
    narrow = {x.dtype for x in (*grads, *copies)} - {torch.float32, torch.bfloat16, torch.float16}
    if wide or narrow or len({copy.dtype for copy in copies}) > 1:
        found = {"params, ms, vs": wide, "grads, copies": narrow or {copy.dtype for copy in copies}}
        words = "; ".join(f"{name}: {', '.join(sorted(map(str, dtypes)))}" for name, dtypes in found.items() if dtypes)
        return f"{words}: kernels update float32 parameters and moments with narrower or equal gradients and copies of one dtype"
    return None


def no_workspace(*_: object, **__: object) -> int:
    """The workspace of implementations that allocate only their results."""
    return 0


def norm_supports(arch: str, x: Tensor, *others: Tensor | None, **params: object) -> str | None:
    """None if a row has at most 32768 elements (a kernel holds it in registers) and dtypes are as in `floating`; else why not."""
    if x.ndim < 1 or x.shape[-1] > 32768:
        return f"rows of {x.shape[-1] if x.ndim else 'no dim'}: kernels hold rows of at most 32768 elements in registers"
    return floating(arch, x, *others, **params)


def _triton(
    primitive: str, module: str, supports: Supports = floating, workspace: Callable[..., int] = no_workspace
) -> tuple[str, tuple[Implementation, ...]]:
    return primitive, (Implementation("triton", f"mpar.kernels.{module}", primitive, supports, workspace),)


def _grouped(primitive: str, workspace: Callable[..., int]) -> tuple[str, tuple[Implementation, ...]]:
    module = "mpar.kernels._grouped_matmul"
    return primitive, (
        Implementation("triton", module, primitive, grouped_matmul_supports, workspace),
        Implementation("grouped_mm", module, f"{primitive}_by_torch", grouped_mm_supports, workspace),
    )


def _attention() -> tuple[str, tuple[Implementation, ...]]:
    primitive, (triton,) = _triton("attention", "_attention", attention_supports)
    gluon = Implementation("gluon", "mpar.kernels._attention_gluon", primitive, attention_gluon_supports, no_workspace)
    return primitive, (triton, gluon)  # in this order until Gluon's has been measured


CATALOGUE: dict[str, tuple[Implementation, ...]] = dict(
    [
        _attention(),
        _triton("attention_bwd", "_attention", attention_supports, attention_bwd_workspace),
        _triton("merge_attention", "_attention_merge", merge_supports),
        _triton("merge_attention_bwd", "_attention_merge", merge_supports),
        _triton("paged_attention", "_paged_attention", paged_attention_supports, paged_attention_workspace),
        _triton("adamw_many", "_adamw", updates),
        _triton("add_layer_norm", "_layer_norm", norm_supports),
        _triton("add_layer_norm_bwd", "_layer_norm", norm_supports),
        _triton("add_rms_norm", "_rms_norm", norm_supports),
        _triton("add_rms_norm_bwd", "_rms_norm", norm_supports),
        _triton("layer_norm", "_layer_norm", norm_supports),
        _triton("layer_norm_bwd", "_layer_norm", norm_supports),
        _triton("rms_norm", "_rms_norm", norm_supports),
        _triton("rms_norm_bwd", "_rms_norm", norm_supports),
        _triton("quantise_fp8", "_quantise_fp8", quantise_supports, quantise_workspace),
        _triton("quantise_fp8_both", "_quantise_fp8", quantise_supports, quantise_both_workspace),
        _triton("dequantise_fp8", "_quantise_fp8", quantise_supports),
        _triton("dequantise_nf4", "_dequantise_nf4", dequantise_nf4_supports),
        _triton("fp8_matmul", "_fp8_matmul", fp8_matmul_supports),
        _grouped("grouped_matmul", grouped_matmul_workspace),
        _grouped("grouped_matmul_dw", grouped_matmul_dw_workspace),
        _triton("topk_router", "_topk_router", router_supports),
        _triton("topk_router_bwd", "_topk_router", router_supports),
        _triton("expert_order", "_permute", expert_order_supports, expert_order_workspace),
        _triton("permute", "_permute", rows_support),
        _triton("unpermute", "_permute", rows_support),
        _triton("unpermute_bwd", "_permute", rows_support),
        _triton("geglu", "_geglu"),
        _triton("geglu_bwd", "_geglu"),
        _triton("rope", "_rope", rope_supports),
        _triton("rope_many", "_rope", rope_supports),
        _triton("swiglu", "_swiglu"),
        _triton("swiglu_bwd", "_swiglu"),
        _triton("cross_entropy", "_cross_entropy"),
        _triton("cross_entropy_bwd", "_cross_entropy"),
        _triton("cross_entropy_stats", "_cross_entropy"),
        _triton("linear_cross_entropy", "_linear_cross_entropy", workspace=forward_workspace),
        _triton("linear_cross_entropy_bwd", "_linear_cross_entropy", workspace=backward_workspace),
        _triton("linear_cross_entropy_grad", "_linear_cross_entropy", workspace=grad_workspace),
        _triton("linear_cross_entropy_stats", "_linear_cross_entropy", workspace=forward_workspace),
    ]
)
"""Implementations of each primitive, best first: `kernels=auto` takes the first that supports the call. `def_kernel` adds one."""

REFERENCE_WORKSPACE: Mapping[str, Callable[..., int]] = {
    "attention": scores_workspace,
    "attention_bwd": scores_bwd_workspace,
}
"""Workspaces of references on a GPU, for those primitives whose reference needs another one there than on a CPU."""
