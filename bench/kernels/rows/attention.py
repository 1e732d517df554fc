"""Attention: dense, grouped, packed documents, sliding window, two head sizes; forward and backward."""

import dataclasses
import functools
import importlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.kernels._row import Built, Row, Setting, Variant, attempt, tflops, times
from mpar.kernels import implementation
from tools.kernel_shapes import (
    ATTENTION,
    ATTENTION_LATENT,
    ATTENTION_LENGTHS,
    ATTENTION_LONG,
    ATTENTION_PACKED,
    ATTENTION_SMALL_HEADS,
    ATTENTION_WINDOW,
)

__all__ = ["LONG_ROWS", "ROWS"]

BACKENDS = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
CHUNK = 512
"""Queries at a time in the float64 reference."""


@dataclass(frozen=True)
class Problem:
    """Operands, and which keys a query sees: those not after it, of its document, and inside its window."""

    q_BSNH: Tensor
    k_BMKH: Tensor
    v_BMKH: Tensor
    dout_BSNH: Tensor
    documents_BS: Tensor | None = None
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.q_BSNH.shape[-1] ** -0.5

    def forward(self) -> tuple[Tensor, Tensor]:
        """Our forward kernel: output and log-sum-exp."""
        masks = (None, None, self.documents_BS, self.documents_BS, None)
        return implementation("attention", "triton")(self.q_BSNH, self.k_BMKH, self.v_BMKH, *masks, **self._params())

    def backward(self, out_BSNH: Tensor, lse_BSN: Tensor) -> tuple[Tensor, ...]:
        """Our backward kernels: gradients of q, k and v."""
        masks = (None, None, self.documents_BS, self.documents_BS, None)
        operands = (self.q_BSNH, self.k_BMKH, self.v_BMKH, *masks, out_BSNH, lse_BSN, self.dout_BSNH, None)
        return implementation("attention_bwd", "triton")(*operands, **self._params())[:3]

    def flops(self) -> int:
        """FLOPs of the forward: two products for every pair of a query and a key that it sees."""
        size = self.q_BSNH.shape[3] + self.v_BMKH.shape[3]
        return 2 * self.q_BSNH.shape[2] * size * self._pairs()

    def bytes(self) -> int:
        """Bytes of the forward: operands are read once, and the output is written once."""
        out = self.q_BSNH.numel() // self.q_BSNH.shape[3] * self.v_BMKH.shape[3] * self.q_BSNH.itemsize
        return sum(x.nbytes for x in (self.q_BSNH, self.k_BMKH, self.v_BMKH)) + out

    def _pairs(self) -> int:
        B, S = self.q_BSNH.shape[:2]
        if self.documents_BS is not None:
            lengths = torch.unique_consecutive(self.documents_BS[0], return_counts=True)[1].tolist()
            return B * sum(length * (length + 1) // 2 for length in lengths)
        return B * sum(min(i + 1, self.window or S) for i in range(S))

    def _params(self) -> dict[str, Any]:
        return {"causal": True, "window": self.window, "scale": self.scale, "soft_cap": None}


def problem(
    setting: Setting,
    *,
    B: int,
    S: int,
    N: int,
    K: int,
    H: int,
    V: int | None = None,
    window: int | None = None,
    documents: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Random operands. `documents`: how many are packed into every row; their lengths are lognormal and add up to S."""
    shapes = (B, S, N, H), (B, S, K, H), (B, S, K, V or H), (B, S, N, V or H)
    q, k, v, dout = (setting.normal(*shape, dtype=dtype) for shape in shapes)
    packed = _documents(S, documents).to(setting.device).expand(B, S).contiguous() if documents else None
    return Problem(q, k, v, dout, packed, window)


def reference(problem: Problem, *, backward: bool) -> list[Tensor]:
    """Results of the first sequence and the first kv head in float64: out and lse, or the gradients of q, k and v."""
    q_NSH, k_MH, v_MH, dout_NSH = _first(problem)
    S, scale = q_NSH.shape[1], problem.scale
    out, lse = torch.empty_like(dout_NSH), q_NSH.new_empty(q_NSH.shape[:2])
    dq, dk, dv = torch.empty_like(q_NSH), torch.zeros_like(k_MH), torch.zeros_like(v_MH)
    keys = torch.arange(S, device=q_NSH.device)
    for first in range(0, S, CHUNK):
        rows = slice(first, first + CHUNK)
        scores = scale * q_NSH[:, rows] @ k_MH.T
        visible = _visible(problem, keys[rows, None], keys[None, :])
        scores = scores.masked_fill(~visible, -math.inf)
        lse[:, rows] = scores.logsumexp(-1)
        p = (scores - lse[:, rows, None]).exp_()
        out[:, rows] = p @ v_MH
        if not backward:
            continue
        dout = dout_NSH[:, rows]
        dv += torch.einsum("nsm,nsv->mv", p, dout)
        dscores = p * (dout @ v_MH.T - (dout * out[:, rows]).sum(-1, keepdim=True)) * scale
        dq[:, rows] = dscores @ k_MH
        dk += torch.einsum("nsm,nsh->mh", dscores, q_NSH[:, rows])
    return [dq.transpose(0, 1), dk, dv] if backward else [out.transpose(0, 1), lse.transpose(0, 1)]


def dense(setting: Setting, *, backward: bool = False, **sizes: Any) -> Built:
    """Causal attention beside torch's fused kernels."""
    p = problem(setting, **sizes)
    peers = {
        name: attempt(functools.partial(_sdpa, p, backend, backward=backward)) for name, backend in _backends(setting).items()
    }
    return _built(p, peers, backward=backward)


def masked(setting: Setting, *, backward: bool = False, **sizes: Any) -> Built:
    """Documents or a window, beside flex_attention with a block mask, and torch's kernel for packed sequences."""
    p = problem(setting, **sizes)
    peers: dict[str, Variant | str] = {"flex_attention": attempt(lambda: _flex(setting, p, backward=backward))}
    if p.documents_BS is not None and not backward:
        peers["varlen_attn"] = attempt(lambda: _varlen(setting, p))
    return _built(p, peers, backward=backward)


def two_head_sizes(setting: Setting, **sizes: Any) -> Built:
    """Queries and keys of one head size and values of another, beside torch's kernels, with values as they are and padded."""
    p = problem(setting, **sizes)
    size = p.q_BSNH.shape[3]
    padded = Problem(p.q_BSNH, p.k_BMKH, F.pad(p.v_BMKH, (0, size - p.v_BMKH.shape[3])), p.dout_BSNH)
    peers: dict[str, Variant | str] = {}
    for name, backend in _backends(setting).items():
        peers[name] = _sdpa(p, backend, backward=False)
        peers[f"padded {name}"] = Variant(_sdpa(padded, backend, backward=False).run, functools.partial(_cut, p.v_BMKH.shape[3]))
    return _built(p, peers, backward=False)


def _built(p: Problem, peers: Mapping[str, Variant | str], *, backward: bool) -> Built:
    if not backward:
        ours = Variant(p.forward, lambda result: _select(p, *result))
        return Built(ours, peers, lambda: reference(p, backward=False), p.bytes(), p.flops())
    out_BSNH, lse_BSN = p.forward()
    ours = Variant(lambda: p.backward(out_BSNH, lse_BSN), lambda grads: _select_gradients(p, *grads))
    moved = 2 * p.bytes() + out_BSNH.nbytes  # q, k, v, out, dout; dq, dk, dv
    return Built(ours, peers, lambda: reference(p, backward=True), moved, p.flops() * 5 // 2)


def _backends(setting: Setting) -> dict[str, SDPBackend]:
    return {"sdpa math": SDPBackend.MATH} if setting.device.type == "cpu" else BACKENDS


def _sdpa(p: Problem, backend: SDPBackend, *, backward: bool) -> Variant:
    q, k, v, dout = (x.transpose(1, 2) for x in (p.q_BSNH, p.k_BMKH, p.v_BMKH, p.dout_BSNH))
    groups = q.shape[1] // k.shape[1]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    if not backward:
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        return Variant(lambda: forward(q, k, v), lambda out: _select(p, out.transpose(1, 2)))
    try:
        forward(q, k, v)
    except RuntimeError:  # the backend takes no groups: keys are repeated for every head, and their gradients added up afterwards
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return _pull_back(forward, p, q, k, v, dout)


def _flex(setting: Setting, p: Problem, *, backward: bool) -> Variant | str:
    if backward and setting.device.type == "cpu":
        return "needs a GPU"
    q, k, v, dout = (x.transpose(1, 2) for x in (p.q_BSNH, p.k_BMKH, p.v_BMKH, p.dout_BSNH))
    B, S = p.q_BSNH.shape[:2]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i
        if p.window is not None:
            seen = seen & (i - j < p.window)
        return seen if p.documents_BS is None else seen & (p.documents_BS[b, i] == p.documents_BS[b, j])

    blocks = create_block_mask(visible, B, None, S, S, device=str(setting.device))
    fused = setting.compiled(flex_attention)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(q, k, v, block_mask=blocks, scale=p.scale, enable_gqa=k.shape[1] != q.shape[1])

    if backward:
        return _pull_back(forward, p, q, k, v, dout)
    return Variant(lambda: forward(q, k, v), lambda out: _select(p, out.transpose(1, 2)))


def _varlen(setting: Setting, p: Problem) -> Variant | str:
    if setting.device.type == "cpu":
        return "needs a GPU"
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return "not in this torch"
    lengths = torch.unique_consecutive(p.documents_BS[0], return_counts=True)[1]
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    groups = p.q_BSNH.shape[2] // p.k_BMKH.shape[2]
    q = p.q_BSNH[0]
    k, v = (x[0].repeat_interleave(groups, dim=1) for x in (p.k_BMKH, p.v_BMKH))
    longest = int(lengths.max())
    try:
        varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
        options: dict[str, Any] = {"window_size": (-1, 0)}
    except TypeError:  # an older version, which has a flag instead of a window
        options = {"is_causal": True}
    return Variant(
        lambda: varlen_attn(q, k, v, starts, starts, longest, longest, **options), lambda out: _select(p, out.unsqueeze(0))
    )


def _pull_back(forward: Callable[..., Tensor], p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Variant:
    """The backward alone. Its forward runs once, when the backward is first called."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    @functools.cache
    def out() -> Tensor:
        return forward(*leaves)

    def run() -> Any:
        return torch.autograd.grad(out(), leaves, dout, retain_graph=True)

    return Variant(run, lambda grads: _select_gradients(p, *(x.transpose(1, 2) for x in grads)))


def _select(p: Problem, out_BSNH: Tensor, lse_BSN: Tensor | None = None) -> list[Tensor]:
    groups = p.q_BSNH.shape[2] // p.k_BMKH.shape[2]
    return [x[0, :, :groups] for x in (out_BSNH, lse_BSN) if x is not None]


def _select_gradients(p: Problem, dq_BSNH: Tensor, dk_BMKH: Tensor, dv_BMKH: Tensor) -> list[Tensor]:
    copies = dk_BMKH.shape[2] // p.k_BMKH.shape[2]  # how many copies of every kv head a peer needed
    return [*_select(p, dq_BSNH), *(x[0, :, :copies].double().sum(1).to(x.dtype) for x in (dk_BMKH, dv_BMKH))]


def _cut(size: int, out: Tensor) -> list[Tensor]:
    return [out.transpose(1, 2)[0, :, :1, :size]]


def _first(p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = p.q_BSNH.shape[2] // p.k_BMKH.shape[2]
    q_NSH, dout_NSH = (x[0, :, :groups].transpose(0, 1).double() for x in (p.q_BSNH, p.dout_BSNH))
    return q_NSH, p.k_BMKH[0, :, 0].double(), p.v_BMKH[0, :, 0].double(), dout_NSH


def _visible(p: Problem, i: Tensor, j: Tensor) -> Tensor:
    seen = (j <= i) & (i - j < (p.window or p.q_BSNH.shape[1]))
    return seen if p.documents_BS is None else seen & (p.documents_BS[0, i] == p.documents_BS[0, j])


def _documents(total: int, count: int) -> Tensor:
    draw = random.Random(0)
    weights = [draw.lognormvariate(0.0, 1.0) for _ in range(count)]
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(count)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return torch.repeat_interleave(torch.arange(count, dtype=torch.int32), torch.tensor(lengths))


def _half(row: Row) -> Row:
    """The same row in float16."""
    assert row.build is not None
    return dataclasses.replace(row, build=functools.partial(row.build, dtype=torch.float16), dtype="float16")


ROWS = [
    Row(1, "attention fwd", dense, ATTENTION["128"], [times("sdpa cudnn", 0.70), tflops(400)]),
    Row(2, "attention fwd", dense, ATTENTION_LONG, [times("sdpa cudnn", 0.70), times("sdpa flash", 1.15)]),
    Row(3, "attention fwd", dense, ATTENTION_SMALL_HEADS, [times("sdpa", 0.80)]),
    *(
        Row(
            4,
            "attention bwd",
            functools.partial(dense, backward=True),
            shape,
            [times("sdpa cudnn", 0.55), times("sdpa flash", 0.90)],
        )
        for shape in (ATTENTION["128"], ATTENTION_LONG)
    ),
    Row(5, "attention packed fwd", masked, ATTENTION_PACKED, [times("flex_attention", 1.15)]),
    Row(
        5,
        "attention packed bwd",
        functools.partial(masked, backward=True),
        ATTENTION_PACKED,
        [times("flex_attention", 1.15)],
    ),
    Row(6, "attention window fwd", masked, ATTENTION_WINDOW, [times("flex_attention", 1.10)]),
    Row(7, "attention latent fwd", two_head_sizes, ATTENTION_LATENT, [times("padded sdpa", 1.10)]),
]

LONG_ROWS = [
    *(_half(row) for row in ROWS if row.number <= 4),
    *(
        Row(
            number,
            f"attention {name}",
            functools.partial(dense, backward=backward),
            shape,
            ROWS[0].bars[:1] if not backward else [],
        )
        for shape in ATTENTION_LENGTHS
        for number, name, backward in ((2, "fwd", False), (4, "bwd", True))
    ),
]
"""Rows of the long form: float16, and lengths from 1k to 32k with as many sequences as make 16k tokens."""
