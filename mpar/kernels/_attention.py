"""Attention: the functions that launch the kernels. Kernels load tiles by descriptors of (B, N, S, H) views, of any strides."""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._attention_backward import attention_delta, attention_dkdv, attention_dq
from mpar.kernels._attention_forward import attention_fwd
from mpar.kernels._attention_support import PADDING, attention_supports
from mpar.kernels._attention_tiles import tile_ranges
from mpar.kernels._launch import arch_of, describe, launch, tuned
from mpar.kernels._table import Tuning, classes

__all__ = ["attention", "attention_bwd"]


@dataclass(frozen=True)
class _Call:
    """The operands that forward and backward share, ready for kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_order: Tensor | None
    k_order: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None

    @cached_property
    def size_class(self) -> str:
        size, size_v = self.q.shape[3], self.v.shape[3]
        return str(size) if size == size_v else f"{size},{size_v}"

    def entry(self, kernel: str) -> Tuning:
        """How to launch `kernel`. Documents and soft caps take registers; if too many, the table has a class for such calls."""
        heavy = f"{self.size_class} documents or cap"
        masked = self.q_documents is not None or self.soft_cap is not None
        return tuned(kernel, self.q, heavy if masked and heavy in classes(kernel, arch_of(self.q)) else self.size_class)

    @property
    def tma(self) -> bool:
        """Whether kernels load tiles by descriptors. On sm_80 Triton would replace descriptors by unaligned pointers."""
        return arch_of(self.q) != "sm_80"

    @property
    def parts(self) -> tuple[int, int]:
        """The head size of q and k as a sum of powers of two; the second may be 0."""
        size = self.q.shape[3]
        return (128, 64) if size == 192 else (size, 0)

    @property
    def window_size(self) -> int:
        return 0 if self.window is None else min(self.window, 2**30)

    def constants(self) -> dict[str, object]:
        head, rest = self.parts
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "SOFT_CAP": self.soft_cap is not None,
            "HEAD": head,
            "REST": rest,
            "VALUE": self.v.shape[3],
            "TMA": self.tma,
        }

    def masks(self, entry: Tuning, *, from_keys: bool = False) -> tuple[object, ...]:
        """Arguments of kernels: ranges, orders, documents, and how many ranges a batch row has (0: all batch rows share them)."""
        queries = self.q_order, self.q_documents, self.q.shape[1], entry.blocks["BLOCK_M"]
        keys = self.k_order, self.k_documents, self.k.shape[1], entry.blocks["BLOCK_N"]
        ranges = tile_ranges(
            *((keys, queries) if from_keys else (queries, keys)),
            from_keys=from_keys,
            causal=self.causal,
            window=None if self.window is None else self.window_size,
            on=self.q,
            tuning=tuned("attention_ranges", self.q),
        )
        stride = 0 if ranges is None or self.q_documents is None else ranges.shape[1]
        return ranges, self.q_order, self.k_order, self.q_documents, self.k_documents, stride

    def scalars(self) -> tuple[float, ...]:
        return self.window_size, self.scale, 0.0 if self.soft_cap is None else self.soft_cap

    def tiles_of(self, x: Tensor, rows: int) -> tuple[object, object]:
        """What kernels load the two parts of heads of q or k from; without a second part, the first is given in its place."""
        head, rest = self.parts
        main = self.tile_of(x, rows, head)
        return main, self.tile_of(x, rows, rest) if rest else main

    def tile_of(self, x: Tensor, rows: int, width: int) -> object:
        """What kernels load tiles of `x` (B, S, N, H) from: a descriptor of it, or on sm_80 `x` itself, which is contiguous."""
        return describe(x.transpose(1, 2), [1, 1, rows, width]) if self.tma else x


def attention(
    q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; see `mpar.ops.attention`."""
    call = _prepare(q, k, v, q_order, k_order, q_documents, k_documents, causal, window, scale, soft_cap)
    (B, S, N, _), (M, K), size_v = q.shape, k.shape[1:3], v.shape[3]
    out = torch.empty((B, S, N, size_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, S, N), dtype=torch.float32, device=q.device)
    if not lse.numel() or not M:
        lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.expand(B, S, N))
        return out.zero_(), lse
    entry = call.entry("attention_fwd")
    rows, keys = entry.blocks["BLOCK_M"], entry.blocks["BLOCK_N"]
    num_tiles = triton.cdiv(S, rows)
    launch(
        attention_fwd,
        (num_tiles * B * N,),
        *call.tiles_of(call.q, rows),
        *call.tiles_of(call.k, keys),
        call.tile_of(call.v, keys, size_v),
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        *call.masks(entry),
        S,
        M,
        K,
        N // K,
        num_tiles,
        *call.scalars(),
        on=out,
        tuning=entry,
        **call.constants(),
    )
    return out, lse


def attention_bwd(
    q, k, v, q_order, k_order, q_documents, k_documents, sinks, out, lse, dout, dlse, *, causal, window, scale, soft_cap
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks."""
    call = _prepare(q, k, v, q_order, k_order, q_documents, k_documents, causal, window, scale, soft_cap)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not lse.numel() or not k.numel():
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        dsinks = q.new_empty(0) if sinks is None else dlse.sum((0, 1)).to(sinks.dtype)
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks
    dout = _loadable(torch.zeros_like(out) if dout is None else dout.to(out.dtype))
    levels, delta = _levels_and_delta(call, out.contiguous(), lse.contiguous(), dout, None if dlse is None else dlse.contiguous())
    if k.shape[3] == v.shape[3] == 256:
        _launch_dkdv(call, dout, levels, delta, dk, None)
        _launch_dkdv(call, dout, levels, delta, None, dv)
    else:
        _launch_dkdv(call, dout, levels, delta, dk, dv)
    _launch_dq(call, dout, levels, delta, dq)
    if sinks is None:
        return dq, dk, dv, q.new_empty(0)
    shares = torch.exp(sinks.float().unsqueeze(1) - lse.transpose(1, 2).masked_fill(lse.transpose(1, 2) == -torch.inf, torch.inf))
    dsinks = shares.mul_(delta[:, :, : q.shape[1]]).sum((0, 2)).neg_()  # dscore = p (0 - delta), since the sink's v is 0
    return dq, dk, dv, dsinks.to(sinks.dtype)


def _levels_and_delta(call: _Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    B, S, N, size_v = out.shape
    entry = tuned("attention_delta", out, str(size_v))
    padded = triton.cdiv(S, PADDING) * PADDING
    levels, delta = (torch.empty((B, N, padded), dtype=torch.float32, device=out.device) for _ in range(2))
    grid = (B * N, padded // entry.blocks["BLOCK"])
    tensors, strides = (out, dout, lse, dlse, levels, delta), dout.stride()[:3]
    launch(attention_delta, grid, *tensors, S, N, padded, *strides, on=out, tuning=entry, VALUE=size_v)
    return levels, delta


def _launch_dkdv(call: _Call, dout: Tensor, levels: Tensor, delta: Tensor, dk: Tensor | None, dv: Tensor | None) -> None:
    (B, S, N, _), (M, K) = call.q.shape, call.k.shape[1:3]
    entry = call.entry("attention_dkdv")
    rows, keys = entry.blocks["BLOCK_M"], entry.blocks["BLOCK_N"]
    num_tiles = triton.cdiv(M, keys)
    launch(
        attention_dkdv,
        (num_tiles * B * K,),
        *call.tiles_of(call.q, rows),
        *call.tiles_of(call.k, keys),
        call.tile_of(call.v, keys, call.v.shape[3]),
        call.tile_of(dout, rows, dout.shape[3]),
        levels,
        delta,
        dk,
        dv,
        *call.masks(entry, from_keys=True),
        S,
        M,
        K,
        N // K,
        num_tiles,
        levels.shape[2],
        *call.scalars(),
        on=call.q,
        tuning=entry,
        **call.constants(),
    )


def _launch_dq(call: _Call, dout: Tensor, levels: Tensor, delta: Tensor, dq: Tensor) -> None:
    (B, S, N, _), (M, K) = call.q.shape, call.k.shape[1:3]
    entry = call.entry("attention_dq")
    rows, keys = entry.blocks["BLOCK_M"], entry.blocks["BLOCK_N"]
    num_tiles = triton.cdiv(S, rows)
    launch(
        attention_dq,
        (num_tiles * B * N,),
        *call.tiles_of(call.q, rows),
        *call.tiles_of(call.k, keys),
        call.tile_of(call.v, keys, call.v.shape[3]),
        call.tile_of(dout, rows, dout.shape[3]),
        levels,
        delta,
        dq,
        *call.masks(entry),
        S,
        M,
        K,
        N // K,
        num_tiles,
        levels.shape[2],
        *call.scalars(),
        on=call.q,
        tuning=entry,
        **call.constants(),
    )


def _prepare(q, k, v, q_order, k_order, q_documents, k_documents, causal, window, scale, soft_cap) -> _Call:
    reason = attention_supports(arch_of(q), q, k, v, scale=scale)
    if reason is not None:
        raise KernelError(
            f"attention of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: {reason}. Use mpar.ops.attention."
        )
    masks = [None if x is None else x.contiguous() for x in (q_order, k_order, q_documents, k_documents)]
    tensors = _loadable(q), _loadable(k), _loadable(v), masks[0], masks[1], masks[2], masks[3]
    return _Call(*tensors, causal, window, scale, soft_cap)


def _loadable(x: Tensor) -> Tensor:
    """`x` if descriptors can load it (rows begin at multiples of 16 bytes, features are contiguous), else a contiguous copy.

    On sm_80, which loads by pointers, it is contiguous in any case.
    """
    if arch_of(x) == "sm_80":
        return x.contiguous()
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(stride % unit or not stride for stride in strides):
        x = x.contiguous()
    if all(stride % unit == 0 and stride for stride in x.stride()[:3]):
        return x
    return x.as_strided(x.shape, [s if size > 1 else unit for size, s in zip(x.shape[:3], x.stride()[:3], strict=True)] + [1])
