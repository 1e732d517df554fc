"""The Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7): convolution, state-space scan, gated norm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes, of_past
from mpar.errors import ConfigError
from mpar.models.layers.mamba._config import MambaConfig
from mpar.models.layers.mamba._params import Mamba
from mpar.tree import Leaf, map_leaves, struct

__all__ = ["MAMBA_CARRIED_AXES", "MambaState", "decode_mamba", "mamba", "mamba_slice", "run_by_rows"]

# heads are sharded as queries of attention are, groups as its keys
HEADS: Axes = ("batch", "attend_seq", "attend_heads", "head")
GROUPS: Axes = ("batch", "attend_kv_seq", "attend_kv_heads", None)


@struct
class MambaState(Generic[Leaf]):
    """The state after the tokens so far: the last T = W - 1 inputs of the convolution, and the state of the scan."""

    conv_x_BTNH: Leaf
    conv_b_BTGK: Leaf
    conv_c_BTGK: Leaf
    scan_BNHK: Leaf


MAMBA_CARRIED_AXES: MambaState[Axes] = MambaState(
    conv_x_BTNH=(HEADS[0], None, *HEADS[2:]),
    conv_b_BTGK=(GROUPS[0], None, *GROUPS[2:]),
    conv_c_BTGK=(GROUPS[0], None, *GROUPS[2:]),
    scan_BNHK=(HEADS[0], *HEADS[2:], None),
)


def mamba(params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The mixer applied to `x_BSD`; `context` has documents (B, S) if rows are packed. Each document starts from an empty state.

    Raises ConfigError if the context has an order: permuted tokens cannot be scanned.
    """
    _check_order(context)
    return _run(params, config, x_BSD, context.get("documents"), None)[0]


def mamba_slice(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], past: Sequence[MambaState[Tensor]]
) -> tuple[Tensor, MambaState[Tensor]]:
    """`mamba` for a slice of rows, `x_BSD`: the result, and the state that is carried to the next slice.

    The last entry of `past`, if there is one, is the state that the slice before carried. A row does not use it if a new document
    begins with this slice.
    """
    _check_order(context)
    documents_BS, state = context.get("documents"), past[-1] if past else None
    if state is not None and documents_BS is not None:
        same_document_B1 = context[of_past("documents", len(past) - 1)][:, -1:] == documents_BS[:, :1]
        state = map_leaves(lambda x: torch.where(same_document_B1[..., None, None], x, 0.0), state)
    out_BSD, carried = decode_mamba(params, config, x_BSD, state, documents_BS)
    return out_BSD, carried if documents_BS is None else _of_last_document(carried, documents_BS)


def _of_last_document(state: MambaState[Tensor], documents_BS: Tensor) -> MambaState[Tensor]:
    """The state after a slice, with zeros for those inputs of the convolution that are not of the slice's last document."""
    inputs = state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK
    num_tokens, num_kept = documents_BS.shape[1], state.conv_x_BTNH.shape[1]
    ends_BS = torch.nn.functional.pad((documents_BS[:, 1:] != documents_BS[:, :-1]).long(), (0, 1))
    same_BS = ends_BS.flip(1).cumsum(1).flip(1) == 0
    older_BT = same_BS[:, :1].expand(-1, max(0, num_kept - num_tokens))  # inputs of earlier slices: kept if no document ends here
    same_BT = torch.cat([older_BT, same_BS[:, max(0, num_tokens - num_kept) :]], 1)
    conv_x_BTNH, conv_b_BTGK, conv_c_BTGK = (torch.where(same_BT[..., None, None], x, 0.0) for x in inputs)
    return MambaState(conv_x_BTNH, conv_b_BTGK, conv_c_BTGK, state.scan_BNHK)


def decode_mamba(
    params: Mamba[Tensor],
    config: MambaConfig,
    x_BSD: Tensor,
    state: MambaState[Tensor] | None,
    documents_BS: Tensor | None = None,
) -> tuple[Tensor, MambaState[Tensor]]:
    """The mixer applied to tokens that follow those of `state` (None: they are the first), and the state after them."""
    out_BSD, inputs, scan_BNHK = _run(params, config, x_BSD, documents_BS, state)
    old_inputs = _tensors(state)[:3]
    kept = (_last(x, before, config.conv_width - 1) for x, before in zip(inputs, old_inputs, strict=True))
    conv_x_BTNH, conv_b_BTGK, conv_c_BTGK = kept
    return out_BSD, MambaState(conv_x_BTNH, conv_b_BTGK, conv_c_BTGK, scan_BNHK)


def _check_order(context: Mapping[str, Tensor]) -> None:
    if "order" in context:
        raise ConfigError(
            "cannot scan a sequence whose tokens are permuted: mamba layers need the tokens in their original order.\n"
            "Use strategy.sequence=contiguous, or no context parallelism."
        )


def _tensors(state: MambaState[Tensor] | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if state is None:
        return None, None, None, None
    return state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK, state.scan_BNHK


def _last(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """The last `count` tokens of `before` with `x` behind it, in memory of its own. None for `before` stands for zeros."""
    if x.shape[1] >= count:
        return x[:, x.shape[1] - count :].clone(memory_format=torch.contiguous_format)
    before = x.new_zeros((x.shape[0], count, *x.shape[2:])) if before is None else before
    return torch.cat([before, x], 1)[:, x.shape[1] :]


Convolve = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
"""`fn(number, x, weight, bias)`: the causal convolution of x (0), b (1) or c (2)."""
Scan = Callable[[tuple[Tensor, ...], int], tuple[Tensor, Tensor]]
"""`fn((x, dt, a, b, c, d), chunk)`: the scan, and the state after it."""


def _run(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, documents_BS: Tensor | None, state: MambaState[Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """The output, the inputs of the convolution, and the final state of the scan."""
    *before, old_BNHK = _tensors(state)

    def convolve(number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.causal_conv1d(x, weight, bias, state_BTC=before[number], documents_BS=documents_BS)

    def scan(operands: tuple[Tensor, ...], chunk: int) -> tuple[Tensor, Tensor]:
        return ops.ssd_scan(*operands, state_BNHK=old_BNHK, documents_BS=documents_BS, chunk=chunk)

    return _mix(params, config, x_BSD, convolve, scan)


def run_by_rows(
    params: Mamba[Tensor],
    config: MambaConfig,
    x_BTD: Tensor,
    state: MambaState[Tensor],
    rows_BT: Tensor,
    positions_BT: Tensor,
) -> tuple[Tensor, MambaState[Tensor]]:
    """The mixer applied to tokens of many rows, and the states of all rows after them; `state` has one more dim, for rows."""
    *before, old_BRNHK = (state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK, state.scan_BNHK)
    after: list[Tensor] = []

    def convolve(number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, new = ops.conv_by_rows(x, weight, bias, before[number], rows_BT, positions_BT)
        after.append(new)
        return y

    def scan(operands: tuple[Tensor, ...], chunk: int) -> tuple[Tensor, Tensor]:
        x, dt, a, b, c, d = operands
        return ops.scan_by_rows(x, dt, a, b, c, d, old_BRNHK, rows_BT, positions_BT, chunk=chunk)

    out_BTD, _, scan_BRNHK = _mix(params, config, x_BTD, convolve, scan)
    conv_x, conv_b, conv_c = after
    return out_BTD, MambaState(conv_x, conv_b, conv_c, scan_BRNHK)


def _mix(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, convolve: Convolve, scan: Scan
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """The output, the inputs of the convolution, and what the scan gives as its state."""
    # b and c are made first, so that in the backward they come last: until then the gradients of x_BSD through z, x and dt, which
    # are pending sums, are added up, and then reduced together
    b_BSGK = ops.constrain(_project(x_BSD, params.b_DGK, params.b_bias_GK, "b"), GROUPS)
    c_BSGK = ops.constrain(_project(x_BSD, params.c_DGK, params.c_bias_GK, "c"), GROUPS)
    z_BSNH = _project(x_BSD, params.z_DNH, params.z_bias_NH, "z")
    x_BSNH = ops.constrain(_project(x_BSD, params.x_DNH, params.x_bias_NH, "x"), HEADS)
    dt_BSN = ops.constrain(_time_steps(params, config, x_BSD), HEADS[:3])
    inputs = x_BSNH, b_BSGK, c_BSGK
    x_BSNH = _convolved(0, x_BSNH, params.conv_x_NHW, params.conv_x_bias_NH, HEADS, convolve, "x_conv")
    b_BSGK = _convolved(1, b_BSGK, params.conv_b_GKW, params.conv_b_bias_GK, GROUPS, convolve, "b_conv")
    c_BSGK = _convolved(2, c_BSGK, params.conv_c_GKW, params.conv_c_bias_GK, GROUPS, convolve, "c_conv")
    a_N, skip_N = -_wide(ops.constrain(params.a_log_N, HEADS[2:3])).exp(), ops.constrain(params.skip_N, HEADS[2:3])
    y_BSNH, final_BNHK = scan((x_BSNH, dt_BSN, a_N, b_BSGK, c_BSGK, skip_N), config.chunk)
    y_BSNH = ops.name(ops.constrain(y_BSNH, ("batch", "seq", "heads", "head")), "scan")
    y_BSNH = _gated_norm(y_BSNH, z_BSNH, params.norm_C, config)
    out_BSD = ops.constrain(ops.einsum("bsnh,nhd->bsd", y_BSNH, params.out_NHD), ("batch", "residual_seq", "embed"))
    if params.out_bias_D is not None:
        out_BSD = out_BSD + params.out_bias_D
    return ops.name(out_BSD, "mamba_out"), inputs, final_BNHK


def _wide(x: Tensor) -> Tensor:
    return ops.widen(x, torch.promote_types(x.dtype, torch.float32))


def _project(x_BSD: Tensor, weight_DNH: Tensor, bias_NH: Tensor | None, label: str) -> Tensor:
    y_BSNH = ops.einsum("bsd,dnh->bsnh", x_BSD, weight_DNH)
    return ops.name(y_BSNH if bias_NH is None else y_BSNH + bias_NH, label)


def _convolved(number: int, x: Tensor, weight: Tensor, bias: Tensor | None, axes: Axes, convolve: Convolve, label: str) -> Tensor:
    """The convolution along the sequence, then silu. `axes` are those of `x`; weight and bias are placed as its channels are."""
    weight, bias = ops.constrain(weight, (*axes[2:], None)), None if bias is None else ops.constrain(bias, axes[2:])
    return ops.name(torch.nn.functional.silu(convolve(number, x, weight, bias)), label)


def _time_steps(params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor) -> Tensor:
    """The time step dt of each token and head: positive, and float32 or wider because the scan exponentiates sums of them."""
    dt_BSN = ops.name(ops.einsum("bsd,dn->bsn", x_BSD, params.dt_DN), "dt")
    if params.dt_in_bias_N is not None:
        dt_BSN = dt_BSN + params.dt_in_bias_N
    dt_BSN = torch.nn.functional.softplus(_wide(dt_BSN) + _wide(params.dt_bias_N))
    low, high = config.dt_limits
    return dt_BSN if low is None and high is None else dt_BSN.clamp(low, high)


def _gated_norm(y_BSNH: Tensor, z_BSNH: Tensor, gain_C: Tensor, config: MambaConfig) -> Tensor:
    """`y silu(z)`, each group of heads scaled to unit root-mean-square, times a gain.

    Computed from a sum over the heads of each group, so that the heads of a group may be on several ranks.
    """
    groups = (config.num_groups, config.num_heads // config.num_groups)
    wide_BSGRH = ops.swiglu(_wide(z_BSNH), _wide(y_BSNH)).unflatten(2, groups)
    total_BSG = ops.einsum("bsgrh,bsgrh->bsg", wide_BSGRH, wide_BSGRH)
    rstd_BSG = torch.rsqrt(total_BSG / (groups[1] * config.head_size) + config.norm_eps)
    normed_BSNH = (wide_BSGRH * rstd_BSG[..., None, None]).flatten(2, 3).to(y_BSNH.dtype)
    return ops.name(normed_BSNH * gain_C.unflatten(0, (config.num_heads, config.head_size)), "mamba_norm")
