"""Top-k router: each Triton program computes scores, choice and weights of a few tokens, whose scores it holds in registers.

Experts are chosen by taking the maximum K times: for small K that is less work than a sort, and of equal values the one with the
lowest index is taken first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._launch import arch_of, launch, tuned
from mpar.kernels._moe_support import router_supports
from mpar.ops import ROUTER_TINY

__all__ = ["topk_router", "topk_router_bwd"]


@triton.jit
def _best(values_TE, candidates_TE, index_TE, NONE: tl.constexpr):
    """Per row the index of the largest candidate, the lowest of equal ones; values have no NaN, and there is a candidate."""
    values_TE = tl.where(candidates_TE, values_TE, float("-inf"))
    hit_TE = candidates_TE & (values_TE == tl.max(values_TE, 1)[:, None])
    return tl.min(tl.where(hit_TE, index_TE, NONE), 1)


@triton.jit
def _without_nan(values):
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _in_best_groups(
    values_TE, experts_TE, NUM_EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Whether an expert is in one of the groups with the largest sums of their one or two best."""
    group_TE = experts_TE // (NUM_EXPERTS // GROUPS)
    merit_TE = tl.full(values_TE.shape, float("-inf"), tl.float32)
    for group in range(GROUPS):
        members_TE = group_TE == group
        merit_T = tl.max(tl.where(members_TE, values_TE, float("-inf")), 1)
        if NUM_EXPERTS > GROUPS and GROUP_BEST == 2:
            others_TE = members_TE & (experts_TE != _best(values_TE, members_TE, experts_TE, NONE)[:, None])
            merit_T += tl.max(tl.where(others_TE, values_TE, float("-inf")), 1)
        merit_TE = tl.where(members_TE, _without_nan(merit_T)[:, None], merit_TE)
    left_TE = experts_TE < NUM_EXPERTS
    kept_TE = experts_TE < 0
    for _ in range(GROUPS_KEPT):
        taken_TE = group_TE == (_best(merit_TE, left_TE, experts_TE, NONE) // (NUM_EXPERTS // GROUPS))[:, None]
        kept_TE = kept_TE | taken_TE
        left_TE = left_TE & (taken_TE == 0)
    return kept_TE


@triton.jit
def _softmax(x_TC, inside_TC):
    """Along the last dim, over columns that are inside."""
    x_TC = tl.where(inside_TC, x_TC, float("-inf"))
    e_TC = tl.where(inside_TC, tl.exp(x_TC - tl.max(x_TC, 1)[:, None]), 0.0)
    return e_TC / tl.sum(e_TC, 1)[:, None]


@triton.jit
def _topk_router_fwd(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, scores_ptr, num_tokens, scale,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, POST: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, GROUP_BEST: tl.constexpr, TINY: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts_1E, slots_1K = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside_TE = (rows_T < num_tokens)[:, None] & (experts_1E < NUM_EXPERTS)
    inside_TK = (rows_T < num_tokens)[:, None] & (slots_1K < K)
    offsets_TE = rows_T[:, None] * NUM_EXPERTS + experts_1E
    logits_TE = tl.load(logits_ptr + offsets_TE, mask=inside_TE, other=0.0).to(tl.float32)
    experts_TE = tl.zeros([BLOCK_T, 1], tl.int32) + experts_1E
    spoilt_T = tl.max((logits_TE != logits_TE).to(tl.int32), 1)
    scores_TE = tl.sigmoid(logits_TE) if SIGMOID else _softmax(logits_TE, experts_TE < NUM_EXPERTS)
    tl.store(scores_ptr + offsets_TE, scores_TE, mask=inside_TE)
    values_TE = logits_TE if POST else scores_TE
    if bias_ptr is not None:
        values_TE += tl.load(bias_ptr + experts_1E, mask=experts_1E < NUM_EXPERTS, other=0.0).to(tl.float32)
    values_TE = _without_nan(values_TE)
    candidates_TE = experts_TE < NUM_EXPERTS
    if GROUPS > 1:
        kept_TE = _in_best_groups(values_TE, experts_TE, NUM_EXPERTS, GROUPS, GROUPS_KEPT, GROUP_BEST, BLOCK_E)
        candidates_TE = kept_TE & candidates_TE
    base_TE = logits_TE if POST and not SIGMOID else scores_TE
    weights_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    chosen_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for k in range(K):
        best_T1 = _best(values_TE, candidates_TE, experts_TE, BLOCK_E)[:, None]
        taken_TE = experts_TE == best_T1
        candidates_TE = candidates_TE & (taken_TE == 0)
        weights_TK = tl.where(slots_1K == k, tl.sum(tl.where(taken_TE, base_TE, 0.0), 1)[:, None], weights_TK)
        chosen_TK = tl.where(slots_1K == k, best_T1, chosen_TK)
    used_TK = tl.zeros([BLOCK_T, 1], tl.int32) + slots_1K < K
    if POST and not SIGMOID:
        weights_TK = _softmax(weights_TK, used_TK)
    if NORMALISE:
        weights_TK = weights_TK / (tl.sum(tl.where(used_TK, weights_TK, 0.0), 1)[:, None] + TINY)
    weights_TK = tl.where(spoilt_T[:, None] > 0, float("nan"), weights_TK * scale)
    offsets_TK = rows_T[:, None] * K + slots_1K
    tl.store(weights_ptr + offsets_TK, weights_TK, mask=inside_TK)
    tl.store(experts_ptr + offsets_TK, chosen_TK, mask=inside_TK)


@triton.jit
def _topk_router_bwd(
    logits_ptr, experts_ptr, scores_ptr, dweights_ptr, dscores_ptr, dlogits_ptr, num_tokens, scale,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, POST: tl.constexpr,
    TINY: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts_1E, slots_1K = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside_TE = (rows_T < num_tokens)[:, None] & (experts_1E < NUM_EXPERTS)
    inside_TK = (rows_T < num_tokens)[:, None] & (slots_1K < K)
    offsets_TE, offsets_TK = rows_T[:, None] * NUM_EXPERTS + experts_1E, rows_T[:, None] * K + slots_1K
    scores_TE = tl.load(scores_ptr + offsets_TE, mask=inside_TE, other=0.0)
    slope_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if dscores_ptr is not None:
        slope_TE = tl.load(dscores_ptr + offsets_TE, mask=inside_TE, other=0.0).to(tl.float32)
    slots_of_softmax: tl.constexpr = POST and not SIGMOID
    if slots_of_softmax:
        slope_TE = scores_TE * (slope_TE - tl.sum(scores_TE * slope_TE, 1)[:, None])
    if dweights_ptr is not None:
        chosen_TK = tl.load(experts_ptr + offsets_TK, mask=inside_TK, other=0)
        dchosen_TK = tl.load(dweights_ptr + offsets_TK, mask=inside_TK, other=0.0).to(tl.float32) * scale
        places_TK = rows_T[:, None] * NUM_EXPERTS + chosen_TK
        if slots_of_softmax:
            picked_TK = tl.load(logits_ptr + places_TK, mask=inside_TK, other=0.0).to(tl.float32)
            picked_TK = _softmax(picked_TK, tl.zeros([BLOCK_T, 1], tl.int32) + slots_1K < K)
        else:
            picked_TK = tl.load(scores_ptr + places_TK, mask=inside_TK, other=0.0)
        if NORMALISE:
            total_T1 = tl.sum(picked_TK, 1)[:, None] + TINY
            dchosen_TK = (dchosen_TK - tl.sum(dchosen_TK * picked_TK, 1)[:, None] / total_T1) / total_T1
        if slots_of_softmax:
            dchosen_TK = picked_TK * (dchosen_TK - tl.sum(picked_TK * dchosen_TK, 1)[:, None])
        for k in range(K):
            expert_T1 = tl.sum(tl.where(slots_1K == k, chosen_TK, 0), 1)[:, None]
            slope_T1 = tl.sum(tl.where(slots_1K == k, dchosen_TK, 0.0), 1)[:, None]
            slope_TE += tl.where(experts_1E == expert_T1, slope_T1, 0.0)
    if SIGMOID:
        slope_TE = scores_TE * (1 - scores_TE) * slope_TE
    elif not POST:
        slope_TE = scores_TE * (slope_TE - tl.sum(scores_TE * slope_TE, 1)[:, None])
    tl.store(dlogits_ptr + offsets_TE, slope_TE.to(dlogits_ptr.dtype.element_ty), mask=inside_TE)


def topk_router(
    logits: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    score: str,
    normalise: bool,
    order: str,
    groups: int,
    groups_kept: int,
    group_best: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, experts and scores; see `mpar.ops.topk_router`."""
    reason = router_supports(arch_of(logits), logits, bias, k=k)
    if reason is not None:
        raise KernelError(f"topk_router: {reason}")
    leading, num_experts = logits.shape[:-1], logits.shape[-1]
    num_tokens = leading.numel()
    logits, bias = logits.contiguous(), None if bias is None else bias.contiguous()
    weights = torch.empty((*leading, k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((*leading, k), dtype=torch.int32, device=logits.device)
    scores = torch.empty((*leading, num_experts), dtype=torch.float32, device=logits.device)
    blocks = _blocks(num_experts, k, score, normalise, order)
    entry = tuned("topk_router_fwd", logits, str(blocks["BLOCK_E"]))
    if num_tokens:
        launch(
            _topk_router_fwd,
            (triton.cdiv(num_tokens, entry.blocks["BLOCK_T"]),),
            *(logits, bias, weights, experts, scores, num_tokens, scale),
            on=logits,
            tuning=entry,
            GROUPS=groups,
            GROUPS_KEPT=groups_kept,
            GROUP_BEST=group_best,
            **blocks,
        )
    return weights, experts, scores


def topk_router_bwd(
    logits: Tensor,
    experts: Tensor,
    scores: Tensor,
    dweights: Tensor | None,
    dscores: Tensor | None,
    *,
    k: int,
    score: str,
    normalise: bool,
    order: str,
    groups: int,
    groups_kept: int,
    group_best: int,
    scale: float,
) -> Tensor:
    """The gradient of the logits."""
    reason = router_supports(arch_of(logits), logits, None, k=k)
    if reason is not None:
        raise KernelError(f"topk_router_bwd: {reason}")
    num_tokens, num_experts = logits.shape[:-1].numel(), logits.shape[-1]
    operands = [None if x is None else x.contiguous() for x in (logits, experts, scores, dweights, dscores)]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    blocks = _blocks(num_experts, k, score, normalise, order)
    entry = tuned("topk_router_bwd", logits, str(blocks["BLOCK_E"]))
    if num_tokens:
        grid = (triton.cdiv(num_tokens, entry.blocks["BLOCK_T"]),)
        launch(_topk_router_bwd, grid, *operands, dlogits, num_tokens, scale, on=logits, tuning=entry, **blocks)
    return dlogits


def _blocks(num_experts: int, k: int, score: str, normalise: bool, order: str) -> dict[str, object]:
    """The compile-time parameters that both kernels have."""
    return {
        "NUM_EXPERTS": num_experts,
        "K": k,
        "SIGMOID": score == "sigmoid",
        "NORMALISE": normalise,
        "POST": order == "post",
        "TINY": ROUTER_TINY,
        "BLOCK_E": max(64, triton.next_power_of_2(num_experts)),
        "BLOCK_K": triton.next_power_of_2(k),
    }
