"""Which calls attention's kernel in Gluon supports, and in words why not the others. This module needs no Triton."""

import functools
import importlib.metadata

import torch
from torch import Tensor

from mpar.kernels._attention_support import attention_supports

__all__ = ["attention_gluon_supports"]

HEADS = (64, 128)
FIRST, LAST = (3, 6), (3, 9)
"""The first and last version of Triton with which it was compiled. Gluon is experimental: its names change with every version."""


def attention_gluon_supports(
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_order: Tensor | None,
    k_order: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    sinks: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> str | None:
    """Why the kernel cannot carry out this call; None if it can."""
    if arch != "sm_90":
        return f"chip {arch}: its warps and matrix instructions are those of sm_90"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"its matrix instructions take float16 and bfloat16, not {q.dtype}"
    if q.shape[3] not in HEADS or v.shape[3] != q.shape[3]:
        return f"head sizes {q.shape[3]} of q and {v.shape[3]} of v: it has {' and '.join(map(str, HEADS))}, the same for both"
    rest: dict[str, object] = {
        "orders": q_order,
        "orders of keys": k_order,
        "documents": q_documents,
        "documents of keys": k_documents,
    }
    rest |= {"sinks": sinks, "a window": window, "a soft cap": soft_cap}
    if given := [name for name, value in rest.items() if value is not None]:
        return f"it knows no {', '.join(given)}"
    return _version_lacks() or attention_supports(arch, q, k, v, scale=scale)


@functools.cache
def _version_lacks() -> str | None:
    """Why the Gluon of the Triton installed here is the wrong one, or None.

    None also where no Triton is installed, so that a program for another machine can be compiled there.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    if FIRST <= (major, minor) <= LAST:
        return None
    return f"Triton {version}: it is written for the Gluon of {'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))}"
