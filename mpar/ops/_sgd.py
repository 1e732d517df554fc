"""Stochastic gradient descent with momentum (Polyak 1964) in the form of torch.optim.SGD, without dampening."""

import torch
from torch import Tensor

from mpar.ops._adamw import check_owned, check_update, empty_like_all, keep_if, skip_scalar
from mpar.ops.primitive import Cost, Primitive

__all__ = ["sgd", "sgd_many"]

_PARAMS = {"momentum": "float", "weight_decay": "float", "nesterov": "bool"}
sgd_p = Primitive("sgd", "param, grad, m, lr, scale, skip? -> new_param, new_m", **_PARAMS)
sgd_many_p = Primitive("sgd_many", "params[], grads[], ms[], lr, scale, skip? -> new_params[], new_ms[]", **_PARAMS)
sgd_many_p.mutates = ("params", "ms", "grads")


def sgd(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    lr: Tensor,
    scale: Tensor,
    *,
    momentum: float,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(new_param, new_m)` after one update; with g = scale * grad + weight_decay * param and m starting as zeros,

        m <- momentum m + g;  param <- param - lr (g + momentum m if nesterov else m)

    `lr` and `scale` are 0-d tensors. If `skip`, a 0-d bool tensor, is true, the results equal param and m, whatever is in `grad`.
    Results have the dtypes of param and m, and are computed in float32 or wider. The operands are not changed. There is no
    gradient. Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return sgd_p.bind(param, grad, m, lr, scale, skip, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


def sgd_many(
    params: list[Tensor],
    grads: list[Tensor],
    ms: list[Tensor],
    lr: Tensor,
    scale: Tensor,
    *,
    momentum: float,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    skip: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """`sgd` of many tensors in one call. The results are `params` and `ms` themselves, overwritten.

    The content of `grads` afterwards is unspecified. The caller must not read an operand afterwards, nor have a view of one.
    Raises ShapeError or DtypeError like `sgd`, listing all operands that are wrong.
    """
    hyper = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return sgd_many_p.bind(params, grads, ms, lr, scale, skip, **hyper)


@sgd_p.def_abstract
def _abstract(param, grad, m, lr, scale, skip, **_):
    groups = {"param": [param], "grad": [grad], "m": [m]}
    check_update("sgd", groups, {"lr": lr, "scale": scale} | skip_scalar("sgd", skip))
    return tuple(empty_like_all([param, m]))


@sgd_p.def_impl
def _impl(param, grad, m, lr, scale, skip, *, momentum, weight_decay, nesterov):
    wide = torch.promote_types(param.dtype, torch.float32)
    wide_param = param.contiguous().to(wide)
    g = (grad.contiguous().to(wide) * scale.double()).add_(wide_param, alpha=weight_decay)
    new_m = (m.contiguous().to(wide) * momentum).add_(g)
    direction = g.add_(new_m, alpha=momentum) if nesterov else new_m
    new = (wide_param - direction * lr.double()).to(param.dtype), new_m.to(m.dtype)
    return new if skip is None else keep_if(skip, (param, m), new)


@sgd_many_p.def_abstract
def _abstract_many(params, grads, ms, lr, scale, skip, **_):
    groups = {"params": params, "grads": grads, "ms": ms}
    check_update("sgd_many", groups, {"lr": lr, "scale": scale} | skip_scalar("sgd_many", skip))
    check_owned("sgd_many", {name: xs for name, xs in groups.items() if name != "grads"})
    return empty_like_all(params), empty_like_all(ms)


@sgd_many_p.def_impl
def _impl_many(params, grads, ms, lr, scale, skip, *, momentum, weight_decay, nesterov):
    options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    for param, grad, m in zip(params, grads, ms, strict=True):
        for old, new in zip((param, m), _impl(param, grad, m, lr, scale, skip, **options), strict=True):
            old.copy_(new)
    return params, ms


sgd_p.def_sharding("..., ..., ..., , , -> ..., ...")
sgd_many_p.def_sharding("..., ..., ..., , , -> ..., ...")
sgd_p.def_batching_leading()
sgd_p.def_cost(lambda param, *_, **__: Cost(flops=7 * param.numel(), bytes=5 * param.nbytes, workspace=3 * param.nbytes))
sgd_many_p.def_cost(
    lambda params, *_, **__: Cost(flops=7 * sum(p.numel() for p in params), bytes=16 * sum(p.nbytes for p in params))
)
