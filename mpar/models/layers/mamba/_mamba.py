"""The Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7): convolution, state-space scan, gated norm."""

from collections.abc import Mapping, Sequence
from typing import Generic

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes, of_past
from mpar.errors import ConfigError
from mpar.models.layers.mamba._config import MambaConfig
from mpar.models.layers.mamba._params import Mamba
from mpar.tree import Leaf, map_leaves, struct

__all__ = ["MAMBA_CARRIED_AXES", "MambaState", "decode_mamba", "mamba", "mamba_slice"]

HEADS: Axes = ("batch", "attend_seq", "attend_heads", "head")  # where attention over the same heads would have queries, and keys
GROUPS: Axes = ("batch", "attend_kv_seq", "attend_kv_heads", None)


@struct
class MambaState(Generic[Leaf]):
    """What a layer keeps of the tokens so far: the last T = W - 1 inputs of the convolution, and the state of the scan."""

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
    """The layer applied to `x_BSD`; `context` has documents (B, S) where rows are packed: each begins without a past.

    Raises ConfigError if the context has an order: tokens that are permuted cannot be scanned.
    """
    _check_order(context)
    return _run(params, config, x_BSD, context.get("documents"), None)[0]


def mamba_slice(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], past: Sequence[MambaState[Tensor]]
) -> tuple[Tensor, MambaState[Tensor]]:
    """The same where `x_BSD` are slices of rows, and the state after them; `past` has that of the slice before, if there is one.

    A document that begins with the slice has no past.
    """
    _check_order(context)
    documents_BS, state = context.get("documents"), past[-1] if past else None
    if state is not None and documents_BS is not None:
        goes_on_B1 = context[of_past("documents", len(past) - 1)][:, -1:] == documents_BS[:, :1]
        state = map_leaves(lambda x: torch.where(goes_on_B1[..., None, None], x, 0.0), state)
    out_BSD, carried = decode_mamba(params, config, x_BSD, state, documents_BS)
    return out_BSD, carried if documents_BS is None else _of_last_document(carried, documents_BS)


def _of_last_document(state: MambaState[Tensor], documents_BS: Tensor) -> MambaState[Tensor]:
    """The state after a slice without those inputs of the convolution behind which another document begins in the slice."""
    inputs = state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK
    count, num_kept = documents_BS.shape[1], state.conv_x_BTNH.shape[1]
    ends_BS = torch.nn.functional.pad((documents_BS[:, 1:] != documents_BS[:, :-1]).long(), (0, 1))
    same_BS = ends_BS.flip(1).cumsum(1).flip(1) == 0
    older_BT = same_BS[:, :1].expand(-1, max(0, num_kept - count))  # of slices before; their state is carried over
    same_BT = torch.cat([older_BT, same_BS[:, max(0, count - num_kept) :]], 1)
    conv_x_BTNH, conv_b_BTGK, conv_c_BTGK = (torch.where(same_BT[..., None, None], x, 0.0) for x in inputs)
    return MambaState(conv_x_BTNH, conv_b_BTGK, conv_c_BTGK, state.scan_BNHK)


def decode_mamba(
    params: Mamba[Tensor],
    config: MambaConfig,
    x_BSD: Tensor,
    state: MambaState[Tensor] | None,
    documents_BS: Tensor | None = None,
) -> tuple[Tensor, MambaState[Tensor]]:
    """The layer applied to the tokens that follow those of `state` (None: the first of all), and the state after them."""
    out_BSD, inputs, scan_BNHK = _run(params, config, x_BSD, documents_BS, state)
    old = _parts(state)[:3]
    kept = (_last(x, before, config.conv_width - 1) for x, before in zip(inputs, old, strict=True))
    conv_x_BTNH, conv_b_BTGK, conv_c_BTGK = kept
    return out_BSD, MambaState(conv_x_BTNH, conv_b_BTGK, conv_c_BTGK, scan_BNHK)


def _check_order(context: Mapping[str, Tensor]) -> None:
    if "order" in context:
        raise ConfigError(
            "cannot scan a sequence whose tokens are permuted: mamba layers need the sequence in its own order.\n"
            "Use strategy.sequence=contiguous, or no context parallelism."
        )


def _parts(state: MambaState[Tensor] | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if state is None:
        return None, None, None, None
    return state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK, state.scan_BNHK


def _last(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """The last `count` of the values `before` and `x` together; zeros come before all. Nothing else is kept with them."""
    if x.shape[1] >= count:
        return x[:, x.shape[1] - count :].clone(memory_format=torch.contiguous_format)
    ahead = x.new_zeros((x.shape[0], count, *x.shape[2:])) if before is None else before
    return torch.cat([ahead, x], 1)[:, x.shape[1] :]


def _run(
    params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor, documents_BS: Tensor | None, state: MambaState[Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """The output, the inputs of the convolution, and the final state of the scan."""
    # those of groups first: the gradients of the others, sums over heads on all ranks, are then added up before they are reduced
    b_BSGK = ops.constrain(_project(x_BSD, params.b_DGK, params.b_bias_GK, "b"), GROUPS)
    c_BSGK = ops.constrain(_project(x_BSD, params.c_DGK, params.c_bias_GK, "c"), GROUPS)
    z_BSNH = _project(x_BSD, params.z_DNH, params.z_bias_NH, "z")
    x_BSNH = ops.constrain(_project(x_BSD, params.x_DNH, params.x_bias_NH, "x"), HEADS)
    dt_BSN = ops.constrain(_steps(params, config, x_BSD), HEADS[:3])
    inputs = x_BSNH, b_BSGK, c_BSGK
    old_x, old_b, old_c, old_BNHK = _parts(state)
    x_BSNH = _convolve(x_BSNH, params.conv_x_NHW, params.conv_x_bias_NH, HEADS, old_x, documents_BS, "x_conv")
    b_BSGK = _convolve(b_BSGK, params.conv_b_GKW, params.conv_b_bias_GK, GROUPS, old_b, documents_BS, "b_conv")
    c_BSGK = _convolve(c_BSGK, params.conv_c_GKW, params.conv_c_bias_GK, GROUPS, old_c, documents_BS, "c_conv")
    y_BSNH, final_BNHK = ops.ssd_scan(
        x_BSNH,
        dt_BSN,
        -_wide(ops.constrain(params.a_log_N, HEADS[2:3])).exp(),
        b_BSGK,
        c_BSGK,
        ops.constrain(params.skip_N, HEADS[2:3]),
        state_BNHK=old_BNHK,
        documents_BS=documents_BS,
        chunk=config.chunk,
    )
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


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, axes: Axes, before: Tensor | None, documents_BS: Tensor | None, label: str
) -> Tensor:
    """`axes` of x; weight and bias go where its channels are."""
    weight, bias = ops.constrain(weight, (*axes[2:], None)), None if bias is None else ops.constrain(bias, axes[2:])
    y = ops.causal_conv1d(x, weight, bias, state_BTC=before, documents_BS=documents_BS)
    return ops.name(torch.nn.functional.silu(y), label)


def _steps(params: Mamba[Tensor], config: MambaConfig, x_BSD: Tensor) -> Tensor:
    """Each token's and head's step, positive, float32 or wider: sums of steps over a chunk are exponents."""
    dt_BSN = ops.name(ops.einsum("bsd,dn->bsn", x_BSD, params.dt_DN), "dt")
    if params.dt_in_bias_N is not None:
        dt_BSN = dt_BSN + params.dt_in_bias_N
    dt_BSN = torch.nn.functional.softplus(_wide(dt_BSN) + _wide(params.dt_bias_N))
    low, high = config.dt_limits
    return dt_BSN if low is None and high is None else dt_BSN.clamp(low, high)


def _gated_norm(y_BSNH: Tensor, z_BSNH: Tensor, gain_C: Tensor, config: MambaConfig) -> Tensor:
    """`y silu(z)`, each group of heads scaled to unit root-mean-square, times a gain.

    Written in sums over the heads of a group, so that heads of one group may be on several ranks.
    """
    groups = (config.num_groups, config.num_heads // config.num_groups)
    wide_BSGRH = ops.swiglu(_wide(z_BSNH), _wide(y_BSNH)).unflatten(2, groups)
    total_BSG = ops.einsum("bsgrh,bsgrh->bsg", wide_BSGRH, wide_BSGRH)
    rstd_BSG = torch.rsqrt(total_BSG / (groups[1] * config.head_size) + config.norm_eps)
    normed_BSNH = (wide_BSGRH * rstd_BSG[..., None, None]).flatten(2, 3).to(y_BSNH.dtype)
    return ops.name(normed_BSNH * gain_C.unflatten(0, (config.num_heads, config.head_size)), "mamba_norm")
