"""AdamW: Adam with decoupled weight decay  (Loshchilov & Hutter 2019, arXiv:1711.05101, alg. 2; its eta_t is part of `lr`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive
from mpar.torch_private import fused_adamw_

__all__ = ["adamw", "adamw_many"]

_PARAMS = {"beta1": "float", "beta2": "float", "eps": "float", "weight_decay": "float"}
adamw_p = Primitive("adamw", "param, grad, m, v, lr, step, scale, skip? -> new_param, new_m, new_v", **_PARAMS)
adamw_many_p = Primitive(
    "adamw_many",
    "params[], grads[], ms[], vs[], lr, step, scale, skip?, copies[] -> new_params[], new_ms[], new_vs[], new_copies[]",
    **_PARAMS,
)
adamw_many_p.mutates = ("params", "ms", "vs", "copies", "grads")
adamw_many_p.opaque = True  # torch has a kernel for all of them


def adamw(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(new_param, new_m, new_v)` after one update; with g = scale * grad,

        m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
        param <- param (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)

    `lr`, `step` (from 1) and `scale` are 0-d tensors. If `skip`, a 0-d bool tensor, is true, the results equal param, m and v,
    whatever is in `grad`. Results have the dtypes of param, m and v, and are computed in float32 or wider. The operands are not
    changed. There is no gradient. Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    hyper = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return adamw_p.bind(param, grad, m, v, lr, step, scale, skip, **hyper)


def adamw_many(
    params: list[Tensor],
    grads: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """`adamw` of many tensors in one call, which overwrites its operands.

    The results are `params`, `ms` and `vs` themselves, overwritten; the content of `grads` afterwards is unspecified. The caller
    must not read an operand afterwards, nor have a view of one. `copies`, if there are any, are one for each of `params`, of
    another floating dtype: they are overwritten with the new parameters, for the next step to compute with.
    Raises ShapeError or DtypeError like `adamw`, listing all operands that are wrong.
    """
    hyper = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return adamw_many_p.bind(params, grads, ms, vs, lr, step, scale, skip, list(copies), **hyper)[:3]


def check_update(name: str, groups: dict[str, list[Tensor]], scalars: dict[str, Tensor]) -> None:
    """Raise unless every group has the shapes of the first, all tensors of groups are floating, and the scalars are 0-d."""
    (first, params), *others = groups.items()
    uneven = {other: len(tensors) for other, tensors in others if len(tensors) != len(params)}
    if uneven:
        raise ShapeError(f"{name}: {len(params)} tensors in {first}, but {uneven}")
    wrong = [
        f"{other}[{i}] is {tuple(x.shape)}, {first}[{i}] is {tuple(p.shape)}"
        for other, tensors in others
        for i, (p, x) in enumerate(zip(params, tensors, strict=True))
        if x.shape != p.shape
    ]
    wrong += [f"{scalar} is {tuple(x.shape)}, must be 0-d" for scalar, x in scalars.items() if x.ndim]
    if wrong:
        raise ShapeError(f"{name}: the operands do not fit each other:\n" + "\n".join(wrong))
    integers = [
        f"{group}[{i}] is {x.dtype}" for group, xs in groups.items() for i, x in enumerate(xs) if not x.is_floating_point()
    ]
    if integers:
        raise DtypeError(f"{name}: operands must have a floating dtype:\n" + "\n".join(integers))


def check_owned(name: str, groups: dict[str, list[Tensor]]) -> None:
    """Raise ShapeError unless every tensor is contiguous, so that it can be overwritten."""
    strided = [f"{group}[{i}]" for group, xs in groups.items() for i, x in enumerate(xs) if not x.is_contiguous()]
    if strided:
        raise ShapeError(f"{name}: {strided} are not contiguous, so they cannot be updated in place; use {name[:-5]}")


def empty_like_all(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors without data of these shapes and dtypes."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


@adamw_p.def_abstract
def _abstract(param, grad, m, v, lr, step, scale, skip, **_):
    groups = {"param": [param], "grad": [grad], "m": [m], "v": [v]}
    check_update("adamw", groups, {"lr": lr, "step": step, "scale": scale} | skip_scalar("adamw", skip))
    return tuple(empty_like_all([param, m, v]))


@adamw_p.def_impl
def _impl(param, grad, m, v, lr, step, scale, skip, *, beta1, beta2, eps, weight_decay):
    wide = torch.promote_types(param.dtype, torch.float32)
    # scalars in float64: otherwise lr * weight_decay would be rounded to the parameter's dtype before 1 - lr * weight_decay
    lr, step, scale = lr.double(), step.double(), scale.double()
    g = grad.contiguous().to(wide) * scale
    new_m = (m.contiguous().to(wide) * beta1).add_(g, alpha=1 - beta1)
    new_v = (v.contiguous().to(wide) * beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (new_v / (1 - beta2**step)).sqrt_().add_(eps)
    update = (new_m / denominator).mul_(lr / (1 - beta1**step))
    new_param = (param.contiguous().to(wide) * (1 - lr * weight_decay)).sub_(update)
    new = new_param.to(param.dtype), new_m.to(m.dtype), new_v.to(v.dtype)
    return new if skip is None else keep_if(skip, (param, m, v), new)


@adamw_many_p.def_abstract
def _abstract_many(params, grads, ms, vs, lr, step, scale, skip, copies, **_):
    groups = {"params": params, "grads": grads, "ms": ms, "vs": vs} | ({"copies": copies} if copies else {})
    check_update("adamw_many", groups, {"lr": lr, "step": step, "scale": scale} | skip_scalar("adamw_many", skip))
    check_owned("adamw_many", {name: xs for name, xs in groups.items() if name != "grads"})
    return empty_like_all(params), empty_like_all(ms), empty_like_all(vs), empty_like_all(copies)


@adamw_many_p.def_impl
def _impl_many(params, grads, ms, vs, lr, step, scale, skip, copies, *, beta1, beta2, eps, weight_decay):
    hyper = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if {x.dtype for x in (*params, *grads, *ms, *vs)} == {torch.float32} and all(g.is_contiguous() for g in grads):
        # torch's kernel divides gradients by grad_scale, in float32, and writes the quotients into grads
        steps = [step.float()] * len(params)
        inverse = scale.double().reciprocal().float()
        options = {"lr": lr.double(), "amsgrad": False, "maximize": False, "grad_scale": inverse}
        if skip is not None:
            options["found_inf"] = skip.float()
        fused_adamw_(params, grads, ms, vs, [], steps, **hyper, **options)
    else:
        for operands in zip(params, grads, ms, vs, strict=True):
            param, _, m, v = operands
            for old, new in zip((param, m, v), _impl(*operands, lr, step, scale, skip, **hyper), strict=True):
                old.copy_(new)
    for copy, param in zip(copies, params, strict=bool(copies)):
        copy.copy_(param)
    return params, ms, vs, copies


def keep_if(skip: Tensor, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`old` where the 0-d bool tensor `skip` is true, else `new`."""
    return tuple(torch.where(skip, before.contiguous(), after) for before, after in zip(old, new, strict=True))


def skip_scalar(name: str, skip: Tensor | None) -> dict[str, Tensor]:
    """`skip` by name, if there is one. Raises DtypeError unless it is bool."""
    if skip is not None and skip.dtype != torch.bool:
        raise DtypeError(f"{name}: skip is {skip.dtype}, must be bool")
    return {} if skip is None else {"skip": skip}


adamw_p.def_sharding("..., ..., ..., ..., , , , -> ..., ..., ...")
adamw_many_p.def_sharding("..., ..., ..., ..., , , , , ... -> ..., ..., ..., ...")
adamw_p.def_batching_leading()
adamw_p.def_cost(lambda param, *_, **__: Cost(flops=15 * param.numel(), bytes=7 * param.nbytes, workspace=3 * param.nbytes))


@adamw_many_p.def_cost
def _cost_many(params, grads, ms, vs, lr, step, scale, skip, copies, **_):
    moved = 2 * sum(x.nbytes for x in (*params, *ms, *vs)) + 2 * sum(g.nbytes for g in grads) + sum(c.nbytes for c in copies)
    return Cost(flops=15 * sum(p.numel() for p in params), bytes=moved)
