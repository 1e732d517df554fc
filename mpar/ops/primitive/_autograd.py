"""The `torch.autograd.Function` around a primitive: it tells `torch.func.grad`, `vjp`, `vmap` and `.backward()` what to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from mpar.errors import DifferentiationError
from mpar.ops.primitive._batching import Batched, BatchingRule, Results
from mpar.ops.primitive._signature import Signature
from mpar.torch_private import unwrap_if_dead

__all__ = [
    "Operand",
    "Static",
    "Transforms",
    "Vjp",
    "gradients_like_operands",
    "make_function",
    "no_gradient",
    "second_vjp",
]

Static = bool | int | float | str | torch.dtype | Sequence[int] | Sequence[bool] | Sequence[float] | None
"""A static parameter of a primitive."""
Operand = Tensor | None | Sequence[Tensor]


@dataclass(frozen=True)
class Vjp:
    """The gradient rule of a primitive: `fn` takes the values named in `reads` and returns the gradients named in `gives`."""

    reads: tuple[str, ...]
    gives: tuple[str, ...]
    fn: Callable[..., Results | tuple[Tensor | None, ...]]


@dataclass
class Transforms:
    """The gradient rule and the batching rule of a primitive; None as long as they are not defined.

    parts: gradient rules that give some of the gradients for less. gradients: the primitives of these rules, by their signatures.
    """

    vjp: Vjp | None = None
    batching: BatchingRule | None = None
    parts: list[Vjp] = field(default_factory=list)
    gradients: "list[tuple[Signature, Transforms]]" = field(default_factory=list)


class _Kept(FunctionCtx):
    """What a call keeps for its backward."""

    params: dict[str, Static]
    names: list[str]
    results: list[Tensor]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _BatchInfo:
    """What torch tells a batching rule."""

    batch_size: int


def make_function(
    name: str, op: Callable[..., Results], signature: Signature, transforms: Transforms
) -> type[torch.autograd.Function]:
    """The autograd Function around `op`. Its arguments are the operands, followed by the static parameters in order. It reads
    `transforms` when it is called, so that rules may be defined after it is made."""
    num_operands, keys = len(signature.operands), tuple(signature.params)

    def split(flat: tuple) -> tuple[Sequence[Tensor | None], dict[str, Static]]:
        return flat[:num_operands], dict(zip(keys, flat[num_operands:], strict=True))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*flat: Operand | Static) -> Results:
            operands, params = split(flat)
            return op(*operands, **params)

        @staticmethod
        def setup_context(ctx: _Kept, inputs: tuple[Operand | Static, ...], output: Results) -> None:
            ctx.set_materialize_grads(False)
            operands, ctx.params = split(inputs)
            results = output if isinstance(output, tuple) else (output,)
            ctx.results = [torch.empty_like(result, device="meta") for result in results]
            ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
            if transforms.vjp is not None:
                given = dict(zip(signature.operands, operands, strict=True)) | dict(zip(signature.results, results, strict=True))
                kept = {read: value for read in transforms.vjp.reads if isinstance(value := given.get(read), Tensor)}
                ctx.names = list(kept)
                ctx.save_for_backward(*kept.values())
                ctx.save_for_forward(*kept.values())

        @staticmethod
        def backward(ctx: _Kept, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = {f"d{operand}" for operand, needs in zip(signature.operands, ctx.needs_input_grad, strict=False) if needs}
            rule = next((part for part in transforms.parts if needed <= set(part.gives)), None) or _rule(name, transforms)
            return *_pull_back(rule, signature, ctx, cotangents), *(None for _ in keys)

        @staticmethod
        def jvp(ctx: _Kept, *tangents: Tensor | None) -> Results:
            return _push_forward(_rule(name, transforms), signature, ctx, tangents)

        @staticmethod
        def vmap(info: _BatchInfo, in_dims: tuple[int | None, ...], *flat: Operand | Static) -> Batched:
            operands, params = split(flat)
            if transforms.batching is None:
                raise DifferentiationError(f"cannot vmap {name}: it has no batching rule")
            return transforms.batching(info.batch_size, in_dims[:num_operands], *operands, **params)

    Function.__name__ = Function.__qualname__ = name
    return Function


def _gradients(vjp: Vjp, values: Mapping[str, Tensor | None], params: Mapping[str, Static]) -> dict[str, Tensor | None]:
    """The gradients that `vjp` gives, by name. Of the values that it reads, those that `values` lacks are None."""
    grads = vjp.fn(*(values.get(name) for name in vjp.reads), **params)
    return dict(zip(vjp.gives, grads if isinstance(grads, tuple) else (grads,), strict=True))


def _rule(name: str, transforms: Transforms) -> Vjp:
    if transforms.vjp is None:
        raise no_gradient(name)
    return transforms.vjp


def _pull_back(vjp: Vjp, signature: Signature, ctx: _Kept, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradient of each operand; None for those that need none."""
    wanted = zip(signature.operands, ctx.needs_input_grad, strict=False)
    if all(dy is None for dy in cotangents):
        return [None for _ in signature.operands]
    cotangent_of = {f"d{result}": dy for result, dy in zip(signature.results, cotangents, strict=True)}
    by_name = _gradients(vjp, dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | cotangent_of, ctx.params)
    return [by_name.get(f"d{operand}") if needed else None for operand, needed in wanted]


def _push_forward(vjp: Vjp, signature: Signature, ctx: _Kept, tangents: Sequence[Tensor | None]) -> Results:
    """The tangents of the results: the transpose of the gradient, which is linear in the cotangents."""
    moved = {f"d{operand}": t for operand, t in zip(signature.operands, tangents, strict=False) if t is not None}
    saved = dict(zip(ctx.names, (forward_ad.unpack_dual(kept)[0] for kept in ctx.saved_tensors), strict=True))
    device = next(iter(moved.values())).device

    def pull_back(*cotangents: Tensor) -> dict[str, Tensor]:
        by_name = {f"d{result}": dy for result, dy in zip(signature.results, cotangents, strict=True)}
        gradients = _gradients(vjp, saved | by_name, ctx.params)
        return {name: g for name in moved if (g := gradients.get(name)) is not None}

    pulled, transpose, *_ = torch.func.vjp(pull_back, *(torch.zeros_like(like, device=device) for like in ctx.results))
    results = transpose({name: moved[name] for name in pulled})
    return results if len(results) > 1 else results[0]


def second_vjp(gradient: Signature, signature: Signature, formula: Callable[..., Results]) -> Vjp:
    """The gradient rule of a gradient of a primitive, of signature `signature`, which `formula` computes too, by differentiable
    ops.

    The gradient is taken for that of `formula`, a function of the operands alone. So results that it reads, such as a logarithm,
    have no gradient: operands get all of it.
    """
    gives = {name[1:] for name in gradient.results}
    reads = (*gradient.operands, *(f"d{name}" for name in gradient.results))

    def pull_back(*values: Tensor | None, **params: Static) -> tuple[Tensor | None, ...]:
        living = [value if value is None else unwrap_if_dead(value) for value in values]
        given = dict(zip(reads, living, strict=True))
        operands = {name: given.get(name) for name in signature.operands}
        floats = {name: x for name, x in operands.items() if x is not None and x.is_floating_point()}
        cotangents = {name: dy for name in (f"d{result}" for result in signature.results) if (dy := given.get(name)) is not None}

        def gradients(floats: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
            def results_of(moved: dict[str, Tensor]) -> tuple[Tensor, ...]:
                return _tuple(formula(*(operands | floats | moved).values(), **params))

            results, back, *_ = torch.func.vjp(results_of, {name: x for name, x in floats.items() if name in gives})
            named = zip(signature.results, results, strict=True)
            return back(tuple(cotangents.get(f"d{name}", torch.zeros_like(result)) for name, result in named))[0]

        made, back, *_ = torch.func.vjp(gradients, floats, cotangents)
        d_operands, d_cotangents = back(
            {name: torch.zeros_like(x) if (dd := given[f"dd{name}"]) is None else dd for name, x in made.items()}
        )
        found = {f"d{name}": value for name, value in (d_operands | d_cotangents).items()}
        return tuple(found.get(f"d{name}") for name in gradient.operands)

    return Vjp(reads, tuple(f"d{name}" for name in gradient.operands), pull_back)


def _tuple(results: Results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def no_gradient(name: str) -> DifferentiationError:
    """The error of an op that has no gradient rule."""
    second = " (it is itself a gradient, and has no second derivative)" if name.endswith("_bwd") else ""
    return DifferentiationError(
        f"cannot differentiate {name}: it has no gradient rule{second}.\n"
        "Detach its operands, or write the function with ops that can be differentiated again."
    )


def gradients_like_operands(name: str, reads: Sequence[str], gives: Sequence[str]) -> Callable[..., Results]:
    """The abstract rule of the gradient of `name`: each gradient has the shape and dtype of its operand, and is contiguous.

    The gradient of an operand that is None is an empty vector.
    """
    unread = [gradient for gradient in gives if gradient[1:] not in reads]

    def abstract(*operands: Tensor | None, **params: Static) -> Results:
        assert not unread, f"{name}_bwd does not read the operands of {unread}: define its abstract rule"
        given = dict(zip(reads, operands, strict=True))
        likes = [given[gradient[1:]] for gradient in gives]
        first = next(operand for operand in operands if operand is not None)
        results = tuple(
            first.new_empty(0) if like is None else torch.empty(like.shape, dtype=like.dtype, device=like.device)
            for like in likes
        )
        return results if len(results) > 1 else results[0]

    return abstract
