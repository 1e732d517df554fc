"""Attention forward for Hopper in Gluon, where the kernel itself says which warps do what: one loads, two groups of four compute.

Shah et al. 2024, arXiv:2407.08608, algorithms 1 and 2. Each program has one tile of queries of one head, half of it for each
group of four warps. Both groups read the keys and values that the loading warp brings into two rings of tiles. A group starts the
scores of one tile before it multiplies the probabilities of the previous tile with their values, so that its exponentials run
beside its products. The groups take turns to start products, so that the exponentials of one run beside the products of the
other. Scores are kept in base 2.

The catalogue lists it after Triton's kernel, so that `auto` does not choose it: it has been compiled, but not measured on a GPU.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mpar.errors import KernelError
from mpar.kernels._attention import _loadable
from mpar.kernels._attention_gluon_support import attention_gluon_supports
from mpar.kernels._launch import arch_of, launch, tuned

__all__ = ["attention", "attention_fwd_gluon", "key_tile"]

LOG2_E = gl.constexpr(1.4426950408889634)
LOADING_REGISTERS = gl.constexpr(24)
COMPUTING_REGISTERS = gl.constexpr(240)
"""Registers of each computing thread. The first computing group gets those that the loading group gives up: (504 - 24) / 2."""

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # else its name in Triton 3.6
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def key_tile(i, tile, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The i-th tile of keys that a tile of queries works on, from the last that it sees to 0; -1 after that.

    The first alone is seen in part: BLOCK_M divides BLOCK_N, so that the diagonal crosses one tile of keys, and keys end in the
    last. Of it each query sees its first key at least, so that no row's maximum is ever -inf.
    """
    end = num_keys
    if CAUSAL:
        end = min(num_keys, (tile + 1) * BLOCK_M)
    last = (end - 1) // BLOCK_N
    return max(last - i, -1)


@gluon.jit
def _load(
    q_src, k_src, v_src, q_tiles, k_tiles, v_tiles, q_full, k_full, k_free, v_full, v_free,
    batch, head, kv_head, tile, num_keys,
    CAUSAL: gl.constexpr, HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp. A tile's barrier is awaited in the phase before the one in which the tile was last filled."""
    HALF: gl.constexpr = BLOCK_M // 2
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), HALF * HEAD * 2)
        load_tile(q_src, [batch, head, tile * BLOCK_M + group * HALF, 0], q_full.index(group), q_tiles.index(group))
    count = key_tile(0, tile, num_keys, CAUSAL, BLOCK_M, BLOCK_N) + 1
    for i in range(count):
        start = key_tile(i, tile, num_keys, CAUSAL, BLOCK_M, BLOCK_N) * BLOCK_N
        slot = i % STAGES
        before = (i // STAGES + 1) & 1
        mbarrier.wait(k_free.index(slot), before)
        mbarrier.expect(k_full.index(slot), BLOCK_N * HEAD * 2)
        load_tile(k_src, [batch, kv_head, start, 0], k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), before)
        mbarrier.expect(v_full.index(slot), BLOCK_N * HEAD * 2)
        load_tile(v_src, [batch, kv_head, start, 0], v_full.index(slot), v_tiles.index(slot))


@gluon.jit
def _matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile (1, 1, ROWS, COLUMNS) in shared memory as a matrix: the same bytes."""
    if hasattr(tile, "reinterpret"):
        return tile.reinterpret(tile.dtype, [ROWS, COLUMNS], LAYOUT)
    else:  # Triton 3.6
        return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def _compute(
    k_tiles, v_tiles, q_tiles, q_full, k_full, k_free, v_full, v_free, turns, out_src, lse_ptr,
    batch, head, num_heads, tile, num_queries, num_keys, factor,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, HEAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A computing group of four warps, 0 or 1: its half of the queries. Products are awaited before their operands go."""
    HALF: gl.constexpr = BLOCK_M // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, VALUES)
    dtype: gl.constexpr = q_tiles.dtype
    rows = tile * BLOCK_M + GROUP * HALF + gl.arange(0, HALF, layout=ROWS)
    none = gl.full([HALF, BLOCK_N], 0.0, gl.float32, SCORES)

    mbarrier.wait(q_full.index(GROUP), 0)
    mbarrier.wait(k_full.index(0), 0)
    q = _matrix(q_tiles.index(GROUP), HALF, HEAD, SHARED)
    k = _matrix(k_tiles.index(0), BLOCK_N, HEAD, SHARED).permute((1, 0))
    products = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(k_free.index(0), count=1)
    first = key_tile(0, tile, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
    keys = first * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    seen = (keys < num_keys)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    scores = gl.where(seen, scores, float("-inf"))
    top = gl.max(scores, 1) * factor
    weights = gl.exp2(scores * factor - top[:, None])
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(dtype), WEIGHTS)
    acc = gl.full([HALF, HEAD], 0.0, gl.float32, VALUES)
    mbarrier.wait(k_full.index(1), 0, pred=first > 0)

    for i in range(1, first + 1):
        slot = i % STAGES
        before = (i - 1) % STAGES
        k = _matrix(k_tiles.index(slot), BLOCK_N, HEAD, SHARED).permute((1, 0))
        v = _matrix(v_tiles.index(before), BLOCK_N, HEAD, SHARED)
        mbarrier.wait(turns.index(GROUP), (i + GROUP) & 1)  # group 0 need not wait for its first turn
        products = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        sums = hopper.warpgroup_mma(p, v, acc, is_async=True)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        scores = hopper.warpgroup_mma_wait(1, deps=[products])
        mbarrier.arrive(k_free.index(slot), count=1)
        new_top = gl.maximum(top, gl.max(scores, 1) * factor)
        decay = gl.exp2(top - new_top)
        weights = gl.exp2(scores * factor - new_top[:, None])
        total = total * decay + gl.sum(weights, 1)
        top = new_top
        # Here, where the products have begun, and as a loop: ptxas would else move the exponentials behind the next wait.
        mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i < first)
        acc, p = hopper.warpgroup_mma_wait(0, deps=[sums, p])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(decay, OUT_ROWS)[:, None]
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)

    before = first % STAGES
    mbarrier.wait(v_full.index(before), (first // STAGES) & 1)
    sums = hopper.warpgroup_mma(p, _matrix(v_tiles.index(before), BLOCK_N, HEAD, SHARED), acc, is_async=True)
    acc, p = hopper.warpgroup_mma_wait(0, deps=[sums, p])
    acc = acc * gl.convert_layout(1.0 / total, OUT_ROWS)[:, None]
    q.store(acc.to(dtype))  # its queries are not needed any more
    hopper.fence_async_shared()
    store_tile(out_src, [batch, head, tile * BLOCK_M + GROUP * HALF, 0], q_tiles.index(GROUP))
    lse = (top + gl.log2(total)) / LOG2_E
    where = (batch.to(gl.int64) * num_queries + rows) * num_heads + head
    gl.store(lse_ptr + where, lse, mask=rows < num_queries)
    tma.store_wait(0)


@gluon.jit
def attention_fwd_gluon(
    q_src, k_src, v_src, out_src, lse_ptr, num_queries, num_keys, num_kv_heads, group, num_tiles, scale,
    CAUSAL: gl.constexpr, HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_N % BLOCK_M == 0 and STAGES > 1)
    tile = num_tiles - 1 - gl.program_id(0) % num_tiles  # where causal, the last tiles have most to do: they start first
    batch_head = gl.program_id(0) // num_tiles
    num_heads = num_kv_heads * group
    batch = batch_head // num_heads
    head = batch_head % num_heads
    q_tiles = gl.allocate_shared_memory(q_src.dtype, [2, 1, 1, BLOCK_M // 2, HEAD], q_src.layout)
    k_tiles = gl.allocate_shared_memory(k_src.dtype, [STAGES, 1, 1, BLOCK_N, HEAD], k_src.layout)
    v_tiles = gl.allocate_shared_memory(v_src.dtype, [STAGES, 1, 1, BLOCK_N, HEAD], v_src.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(turns.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)  # both groups
        mbarrier.init(v_free.index(slot), count=2)
    hopper.fence_async_shared()
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (_compute, (
                k_tiles, v_tiles, q_tiles, q_full, k_full, k_free, v_full, v_free, turns, out_src, lse_ptr,
                batch, head, num_heads, tile, num_queries, num_keys, factor, 0, CAUSAL, HEAD, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_compute, (
                k_tiles, v_tiles, q_tiles, q_full, k_full, k_free, v_full, v_free, turns, out_src, lse_ptr,
                batch, head, num_heads, tile, num_queries, num_keys, factor, 1, CAUSAL, HEAD, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_load, (
                q_src, k_src, v_src, q_tiles, k_tiles, v_tiles, q_full, k_full, k_free, v_full, v_free,
                batch, head, head // group, tile, num_keys, CAUSAL, HEAD, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [COMPUTING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def attention(
    q, k, v, q_order, k_order, q_documents, k_documents, sinks, *, causal, window, scale, soft_cap
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; see `mpar.ops.attention`."""
    masks = q_order, k_order, q_documents, k_documents, sinks
    reason = attention_gluon_supports(arch_of(q), q, k, v, *masks, causal=causal, window=window, scale=scale, soft_cap=soft_cap)
    if reason is not None:
        raise KernelError(f"attention in Gluon of q {tuple(q.shape)}, k {tuple(k.shape)}: {reason}. Use mpar.ops.attention.")
    (B, S, N, H), (M, K) = q.shape, k.shape[1:3]
    out = torch.empty((B, S, N, H), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, S, N), dtype=torch.float32, device=q.device)
    if not lse.numel() or not M:
        return out.zero_(), lse.fill_(-torch.inf)
    entry = tuned("attention_fwd_gluon", q, str(H))
    rows, keys = entry.blocks["BLOCK_M"], entry.blocks["BLOCK_N"]
    num_tiles = triton.cdiv(S, rows)
    launch(
        attention_fwd_gluon,
        (num_tiles * B * N,),
        _describe(_loadable(q), rows // 2),
        _describe(_loadable(k), keys),
        _describe(_loadable(v), keys),
        _describe(out, rows // 2),
        lse,
        S,
        M,
        K,
        N // K,
        num_tiles,
        scale,
        on=out,
        tuning=entry,
        CAUSAL=causal,
        HEAD=H,
    )
    return out, lse


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of tiles (1, 1, rows, H) of the (B, N, S, H) view of `x`, in the layout that matrix instructions read."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]], gl.NVMMASharedLayout(128, 16, 4))
