"""The Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7): convolution, state-space scan, gated norm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes, of_past
from mpar.errors import ConfigError
from mpar.tree import map_leaves, struct

__all__ = [
    "MAMBA_AXES",
    "MAMBA_LEFT_AXES",
    "Mamba",
    "MambaConfig",
    "MambaState",
    "init_mamba_leaf",
    "mamba",
    "mamba_shapes",
    "mamba_slice",
    "mamba_step",
]


HEADS: Axes = ("batch", "attend_seq", "attend_heads", "head")  # where attention over the same heads would have queries, and keys
GROUPS: Axes = ("batch", "attend_kv_seq", "attend_kv_heads", None)


@dataclass(frozen=True)
class MambaConfig:
    """Sizes of one mixer.

    num_heads, head_size: of the scan; their product is the inner size. num_groups: heads of a group share b and c.
    state_size: of each head's state, per element of the head. conv_width: tokens that the convolution sees.
    chunk:      tokens that are worked on at once; no part of the function.
    dt_limits:  the step, after softplus, is kept within them; None is no limit.
    dt_range, dt_floor: steps that fresh parameters begin with: log-uniform in the range, at least the floor.
    out_scale:  what the fresh projection out is multiplied by: where layers are many, residuals begin small.
    bias, conv_bias: whether the projections in and out, and the convolution, have biases.
    Raises ConfigError with all sizes that cannot be.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    chunk: int = 256
    dt_limits: tuple[float | None, float | None] = (None, None)
    dt_range: tuple[float, float] = (0.001, 0.1)
    dt_floor: float = 1e-4
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float = 1e-5
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        names = ("num_heads", "head_size", "num_groups", "state_size", "conv_width", "chunk")
        problems = [f"{name}={getattr(self, name)}: must be a positive int" for name in names if getattr(self, name) < 1]
        if not problems and self.num_heads % self.num_groups:
            problems.append(f"num_groups={self.num_groups} does not divide num_heads={self.num_heads}")
        low, high = self.dt_limits
        if low is not None and high is not None and not low <= high:
            problems.append(f"dt_limits={self.dt_limits}: the first must not exceed the second")
        if not 0 < self.dt_range[0] <= self.dt_range[1] or not self.dt_floor > 0:
            problems.append(
                f"dt_range={self.dt_range}, dt_floor={self.dt_floor}: steps are positive, the first not above the second"
            )
        if problems:
            raise ConfigError("cannot make a mamba layer:\n" + "\n".join(f"  {problem}" for problem in problems))


@struct
class Mamba:
    """Parameters. z is the gate; b, c and x pass through the convolution (W taps); dt is a step for each head.

    The decay of a head is exp(-dt exp(a_log)). C is the inner size, N * H.
    """

    z_DNH: Tensor
    x_DNH: Tensor
    b_DGK: Tensor
    c_DGK: Tensor
    dt_DN: Tensor
    conv_x_NHW: Tensor
    conv_b_GKW: Tensor
    conv_c_GKW: Tensor
    dt_bias_N: Tensor
    a_log_N: Tensor
    skip_N: Tensor
    norm_C: Tensor
    out_NHD: Tensor
    conv_x_bias_NH: Tensor | None = None
    conv_b_bias_GK: Tensor | None = None
    conv_c_bias_GK: Tensor | None = None
    z_bias_NH: Tensor | None = None
    x_bias_NH: Tensor | None = None
    b_bias_GK: Tensor | None = None
    c_bias_GK: Tensor | None = None
    dt_in_bias_N: Tensor | None = None
    out_bias_D: Tensor | None = None


MAMBA_AXES = cast(Any, Mamba)(
    z_DNH=("embed", "heads", "head"),
    x_DNH=("embed", "heads", "head"),
    b_DGK=("embed", "kv_heads", None),
    c_DGK=("embed", "kv_heads", None),
    dt_DN=("embed", "heads"),
    conv_x_NHW=("heads", "head", None),
    conv_b_GKW=("kv_heads", None, None),
    conv_c_GKW=("kv_heads", None, None),
    dt_bias_N=("heads",),
    a_log_N=("heads",),
    skip_N=("heads",),
    norm_C=("heads",),  # with one dim, as the other gains: those are not decayed
    out_NHD=("heads", "head", "embed"),
    conv_x_bias_NH=("heads", "head"),
    conv_b_bias_GK=("kv_heads", None),
    conv_c_bias_GK=("kv_heads", None),
    z_bias_NH=("heads", "head"),
    x_bias_NH=("heads", "head"),
    b_bias_GK=("kv_heads", None),
    c_bias_GK=("kv_heads", None),
    dt_in_bias_N=("heads",),
    out_bias_D=("embed",),
)


@struct
class MambaState:
    """What a layer keeps of the tokens so far: the last T = W - 1 inputs of the convolution, and the state of the scan."""

    conv_x_BTNH: Tensor
    conv_b_BTGK: Tensor
    conv_c_BTGK: Tensor
    scan_BNHK: Tensor


MAMBA_LEFT_AXES = cast(Any, MambaState)(
    conv_x_BTNH=(HEADS[0], None, *HEADS[2:]),
    conv_b_BTGK=(GROUPS[0], None, *GROUPS[2:]),
    conv_c_BTGK=(GROUPS[0], None, *GROUPS[2:]),
    scan_BNHK=(HEADS[0], *HEADS[2:], None),
)


def mamba_shapes(config: MambaConfig, hidden_size: int) -> Mamba:
    """The parameters with a tuple of sizes for each leaf."""
    D, N, H, G, K, W = hidden_size, config.num_heads, config.head_size, config.num_groups, config.state_size, config.conv_width
    return cast(Any, Mamba)(
        z_DNH=(D, N, H),
        x_DNH=(D, N, H),
        b_DGK=(D, G, K),
        c_DGK=(D, G, K),
        dt_DN=(D, N),
        conv_x_NHW=(N, H, W),
        conv_b_GKW=(G, K, W),
        conv_c_GKW=(G, K, W),
        dt_bias_N=(N,),
        a_log_N=(N,),
        skip_N=(N,),
        norm_C=(N * H,),
        out_NHD=(N, H, D),
        conv_x_bias_NH=(N, H) if config.conv_bias else None,
        conv_b_bias_GK=(G, K) if config.conv_bias else None,
        conv_c_bias_GK=(G, K) if config.conv_bias else None,
        z_bias_NH=(N, H) if config.bias else None,
        x_bias_NH=(N, H) if config.bias else None,
        b_bias_GK=(G, K) if config.bias else None,
        c_bias_GK=(G, K) if config.bias else None,
        dt_in_bias_N=(N,) if config.bias else None,
        out_bias_D=(D,) if config.bias else None,
    )


def mamba(params: Mamba, config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The layer applied to `x_BSD`; `context` has documents (B, S) where rows are packed: each begins without a past.

    Raises ConfigError if the context has an order: tokens that are permuted cannot be scanned.
    """
    _check_order(context)
    return _run(params, config, x_BSD, context.get("documents"), None)[0]


def mamba_slice(
    params: Mamba, config: MambaConfig, x_BSD: Tensor, context: Mapping[str, Tensor], past: Sequence[MambaState]
) -> tuple[Tensor, MambaState]:
    """The same where `x_BSD` are slices of rows, and the state after them; `past` has that of the slice before, if there is one.

    A document that begins with the slice has no past.
    """
    _check_order(context)
    documents_BS, state = context.get("documents"), past[-1] if past else None
    if state is not None and documents_BS is not None:
        goes_on_B1 = context[of_past("documents", len(past) - 1)][:, -1:] == documents_BS[:, :1]
        state = map_leaves(lambda x: torch.where(goes_on_B1[..., None, None], x, 0.0), state)
    out_BSD, left = mamba_step(params, config, x_BSD, state, documents_BS)
    return out_BSD, left if documents_BS is None else _of_last_document(left, documents_BS)


def _of_last_document(state: MambaState, documents_BS: Tensor) -> MambaState:
    """The state after a slice without those inputs of the convolution behind which another document begins in the slice."""
    inputs = state.conv_x_BTNH, state.conv_b_BTGK, state.conv_c_BTGK
    count, num_kept = documents_BS.shape[1], state.conv_x_BTNH.shape[1]
    ends_BS = torch.nn.functional.pad((documents_BS[:, 1:] != documents_BS[:, :-1]).long(), (0, 1))
    same_BS = ends_BS.flip(1).cumsum(1).flip(1) == 0
    older_BT = same_BS[:, :1].expand(-1, max(0, num_kept - count))  # of slices before, which left what goes on with the first
    same_BT = torch.cat([older_BT, same_BS[:, max(0, count - num_kept) :]], 1)
    kept = (torch.where(same_BT[..., None, None], x, 0.0) for x in inputs)
    return cast(Any, MambaState)(*kept, state.scan_BNHK)


def mamba_step(
    params: Mamba, config: MambaConfig, x_BSD: Tensor, state: MambaState | None, documents_BS: Tensor | None = None
) -> tuple[Tensor, MambaState]:
    """The layer applied to the tokens that follow those of `state` (None: the first of all), and the state after them."""
    out_BSD, inputs, scan_BNHK = _run(params, config, x_BSD, documents_BS, state)
    old = _parts(state)[:3]
    kept = (_last(x, before, config.conv_width - 1) for x, before in zip(inputs, old, strict=True))
    return out_BSD, cast(Any, MambaState)(*kept, scan_BNHK)


def _check_order(context: Mapping[str, Tensor]) -> None:
    if "order" in context:
        raise ConfigError(
            "cannot scan a sequence whose tokens are permuted: mamba layers need the sequence in its own order.\n"
            "Use strategy.sequence=contiguous, or no context parallelism."
        )


def _parts(state: MambaState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
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
    params: Mamba, config: MambaConfig, x_BSD: Tensor, documents_BS: Tensor | None, state: MambaState | None
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


def _steps(params: Mamba, config: MambaConfig, x_BSD: Tensor) -> Tensor:
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


def init_mamba_leaf(config: MambaConfig, field: str, key: ops.Key, bounds: list[range], dtype: torch.dtype) -> Tensor | None:
    """The part within `bounds` of a fresh leaf, or None if it begins as leaves of its kind do elsewhere.

    Decays exp(-dt n) for head n = 1, 2, ...; steps as `dt_range` says; taps and the projection out uniform within the inverse
    root of the number of terms that are added up, as torch begins such layers.
    """
    sizes, starts = [len(bound) for bound in bounds], [bound.start for bound in bounds]
    if field == "a_log_N":
        return torch.arange(starts[0] + 1, starts[0] + 1 + sizes[0], dtype=torch.float64).log().to(dtype)
    if field == "skip_N":
        return torch.ones(sizes, dtype=dtype)
    if field == "dt_bias_N":
        low, high = (math.log(bound) for bound in config.dt_range)
        dt = (ops.random_uniform(key, sizes, starts=starts).double() * (high - low) + low).exp().clamp(min=config.dt_floor)
        return (dt + torch.log(-torch.expm1(-dt))).to(dtype)  # the inverse of softplus
    if field in ("conv_x_NHW", "conv_b_GKW", "conv_c_GKW", "out_NHD"):
        inner = config.num_heads * config.head_size
        bound = config.out_scale / math.sqrt(inner) if field == "out_NHD" else 1 / math.sqrt(config.conv_width)
        return ((2 * ops.random_uniform(key, sizes, starts=starts).double() - 1) * bound).to(dtype)
    return None
