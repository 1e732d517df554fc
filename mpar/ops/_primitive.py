"""Primitive: an op and all its rules in one object. Forward and backward are one graph node each.

Every primitive is a torch op `mpar::<name>`. A `torch.autograd.Function` around it gives `torch.func.grad`, `vjp`, `vmap`
and `.backward()`; below that the op is opaque, so tracing sees one node. The kernel that torch calls runs the abstract
rule first: wrong operands raise the same error eagerly and while tracing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar.errors import DifferentiationError, UnknownNameError

__all__ = ["PRIMITIVES", "Cost", "Primitive", "ShardingRule", "parse_sharding", "primitive_of"]

PRIMITIVES: dict[str, "Primitive"] = {}
_LIBRARY = torch.library.Library("mpar", "DEF")


@dataclass(frozen=True)
class Cost:
    """What one call costs: floating-point operations, bytes read and written, bytes of workspace freed before it returns."""

    flops: int
    bytes: int
    workspace: int = 0


@dataclass(frozen=True)
class ShardingRule:
    """Factors per dim of each operand and result; `...` stands for any number of leading dims, "(k g)" for a dim made of two.

    A factor that no result has is summed over: sharding it leaves a pending sum. `need_replication` factors are gathered.
    `linear` names the operands in each of which alone the op is linear (a pending sum may pass through it).
    `follows` maps a factor to one that leads it: it is sharded where its operands are, over axes that shard its leader; keys
    follow queries, experts follow rows. `as_is` operands are taken as they are placed: they speak of a rank's own part.
    `ragged` maps a factor to the operand that says which axes may shard it. `leads` operands say first which axes shard their
    factors; else the largest does. `sizes` has factors that no dim is made of alone, such as both of `(g b)`.
    """

    operands: tuple[tuple, ...]
    results: tuple[tuple, ...]
    need_replication: frozenset[str]
    linear: frozenset[str]
    follows: tuple[tuple[str, str], ...] = ()
    as_is: frozenset[str] = frozenset()
    ragged: tuple[tuple[str, str], ...] = ()
    leads: frozenset[str] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()


class Primitive:
    """An op named `name` with tensor operands and results `signature`, such as `"x, weight? -> y"`.

    An operand with `?` may be None, one with `[]` is a list of tensors. `params` are the static keyword arguments with
    their types in torch's schema language (`eps="float"`). An `int` parameter may become a value read at run time
    in a rank graph (a shard's offset), so implementations must not specialise on it.
    """

    def __init__(self, name: str, signature: str, **params: str) -> None:
        operands, results = signature.split("->")
        self.name = name
        self.operands = tuple(re.sub(r"[?\[\]]", "", part).strip() for part in operands.split(",") if part.strip())
        self.results = tuple(part.strip().rstrip("[]") for part in results.split(","))
        self.params = params
        self.takes_lists = "[]" in operands  # for programs: neither differentiated nor batched
        self.bwd: Any = None  # a Primitive once def_vjp has run, which type checkers cannot know
        self.sharded: dict[str, Callable] = {}
        self.lowered: Callable | None = None
        self.sharding: ShardingRule | Callable[..., ShardingRule] | None = None
        self.cost: Callable[..., Cost] | None = None
        self.batching: Callable | None = None
        self.abstract: Callable | None = None
        self.impl: Callable | None = None
        self.pull_back: Callable | None = None
        self.mutates: tuple[str, ...] = ()
        self.asks_host = False  # the implementation asks for data on the host
        self.may_grow_pending = False  # a pending sum passes even though the result has more bytes
        self._vjp: _Vjp | None = None
        _LIBRARY.define(f"{name}{_schema(operands, results, params)}")
        torch.library.register_fake(f"mpar::{name}", self._run_abstract, lib=_LIBRARY)
        self.op = getattr(torch.ops.mpar, name).default
        self._function = _make_function(self)
        PRIMITIVES[name] = self

    def __repr__(self) -> str:
        return f"Primitive({self.name})"

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Apply the primitive; `params` must name every static parameter."""
        if self.takes_lists:
            tensors = [x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else [operand])]
            if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
                raise _no_gradient(self)
        if self.takes_lists or (self.batching is None and self._vjp is None):
            return self.op(*operands, **params)
        return self._function.apply(*operands, *(params[key] for key in self.params))

    def def_abstract(self, fn: Callable) -> Callable:
        """`fn(*operands, **params)` checks its operands and returns results without data: shapes, dtypes and strides."""
        self.abstract = fn
        return fn

    def def_impl(self, fn: Callable) -> Callable:
        """`fn(*operands, **params)` is the meaning of the op on plain tensors."""
        self.impl = fn
        self.def_impl_on("CompositeExplicitAutograd", fn)
        return fn

    def def_impl_on(self, key: str, fn: Callable) -> None:
        """`fn` is called for tensors of torch's dispatch key, such as "CUDA"; it must reproduce the meaning of the op."""

        def checked(*operands: Any, **params: Any) -> Any:
            self._run_abstract(*(_without_data(operand) for operand in operands), **params)
            return fn(*operands, **params)

        _LIBRARY.impl(self.name, checked, key)

    def def_vjp(self, signature: str) -> Callable[[Callable], Callable]:
        """Define the gradient as the primitive `<name>_bwd` with operands and results as in `"x, y, dy -> dx"`.

        Operands are operands of the forward (`x`), its results (`y`) and cotangents of results (`dy`): what is not named is
        not kept for the backward pass. Results are gradients of operands; those not named get none. The function is the
        implementation of `<name>_bwd`; a cotangent that the caller does not have comes as None. Its abstract rule is preset:
        a gradient looks like its operand, contiguous; that of an operand which is None is `first operand.new_empty(0)`.
        """

        def register(fn: Callable) -> Callable:
            reads, gives = (tuple(part.strip() for part in side.split(",")) for side in signature.split("->"))
            operands = ", ".join(f"{name}?" if self._may_be_none(name) else name for name in reads)
            self.bwd = Primitive(f"{self.name}_bwd", f"{operands} -> {', '.join(gives)}", **self.params)
            self.bwd.def_impl(fn)
            self.bwd.def_abstract(self._gradients_like_operands(reads, gives))
            self.bwd.batching = _loop_batching(self.bwd)
            self._vjp = _Vjp(reads, gives, self.bwd.bind)
            return fn

        return register

    def def_vjp_by_ops(self, signature: str) -> Callable[[Callable], Callable]:
        """Like `def_vjp` for a gradient that is itself made of differentiable ops: no new primitive, any order of derivative."""

        def register(fn: Callable) -> Callable:
            reads, gives = (tuple(part.strip() for part in side.split(",")) for side in signature.split("->"))
            self._vjp = _Vjp(reads, gives, fn)
            return fn

        return register

    def def_sharding(self, rule: str, **extras: str) -> None:
        """State the factors of every dim, such as `"... d, d -> ... d"`; the rule of an operand that is None is skipped.

        extras: what `parse_sharding` takes: need_replication, linear, follows, as_is, ragged, leads, sizes.
        """
        self.sharding = self._check_rule(parse_sharding(rule, **extras))

    def def_sharding_from(self, fn: Callable[..., ShardingRule]) -> Callable[..., ShardingRule]:
        """`fn(**params) -> ShardingRule` for an op whose dims depend on its parameters, such as einsum."""
        self.sharding = fn
        return fn

    def sharding_rule(self, **params: Any) -> ShardingRule:
        """The factors of every dim for these static parameters."""
        assert self.sharding is not None, f"primitive {self.name} has no sharding rule"
        return self.sharding if isinstance(self.sharding, ShardingRule) else self._check_rule(self.sharding(**params))

    def _check_rule(self, rule: ShardingRule) -> ShardingRule:
        assert len(rule.operands) == len(self.operands), (self.name, rule)
        assert len(rule.results) == len(self.results), (self.name, rule)
        return rule

    def def_sharded(self, factor: str) -> Callable[[Callable], Callable]:
        """`fn(emit, *operands, **params)` is the local program when `factor` is sharded (`sharding/_emit.py` has `emit`).

        Of several such factors that are sharded, the one that was defined first decides.
        """

        def register(fn: Callable) -> Callable:
            self.sharded[factor] = fn
            return fn

        return register

    def def_lowered(self, fn: Callable) -> Callable:
        """`fn(emit, *operands, **params)` is the local program always, on one rank too: the op is a name for several."""
        self.lowered = fn
        return fn

    def def_cost(self, fn: Callable[..., Cost]) -> Callable[..., Cost]:
        """`fn(*operands, **params) -> Cost` from operands without data."""
        self.cost = fn
        return fn

    def def_batching(self, fn: Callable) -> Callable:
        """`fn(size, dims, *operands, **params) -> (results, dims of results)`: `dims` has each operand's batched dim, or None."""
        self.batching = fn
        return fn

    def def_batching_leading(self) -> None:
        """Batch by one more leading dim. Every operand whose rule starts with `...` gets it; the others must not be batched,
        else the batch is done example by example."""
        loop = _loop_batching(self)

        def rule(size: int, dims: Sequence[int | None], *operands: Any, **params: Any) -> Any:
            sharding = self.sharding_rule(**params)
            leading = [factors[:1] == (("...",),) for factors in sharding.operands]
            stuck = any(dim is not None and not lead for dim, lead in zip(dims, leading, strict=True))
            if stuck or any(factors[:1] != (("...",),) for factors in sharding.results):
                return loop(size, dims, *operands, **params)
            moved = [
                operand if operand is None or not lead else _leading(operand, dim, size)
                for operand, dim, lead in zip(operands, dims, leading, strict=True)
            ]
            results = self.bind(*moved, **params)
            return results, (0 if isinstance(results, Tensor) else tuple(0 for _ in results))

        self.batching = rule

    def def_batching_loop(self) -> None:
        """Batch example by example and stack: for ops whose operands have no room for one more dim."""
        self.batching = _loop_batching(self)

    def def_batching_folded(self) -> None:
        """Batch by folding into dim 0. Every operand whose rule starts with the first factor of the first operand (`b`) gets the
        batch folded in; the others must not be batched, else the batch is done example by example."""
        loop = _loop_batching(self)

        def rule(size: int, dims: Sequence[int | None], *operands: Any, **params: Any) -> Any:
            sharding = self.sharding_rule(**params)
            first = sharding.operands[0][:1]
            folds = [factors[:1] == first for factors in sharding.operands]
            stuck = any(dim is not None and not fold for dim, fold in zip(dims, folds, strict=True))
            if stuck or any(factors[:1] != first for factors in sharding.results):
                return loop(size, dims, *operands, **params)
            folded = [
                operand if operand is None or not fold else _leading(operand, dim, size).flatten(0, 1)
                for operand, dim, fold in zip(operands, dims, folds, strict=True)
            ]
            results = self.bind(*folded, **params)
            if isinstance(results, Tensor):
                return results.unflatten(0, (size, -1)), 0
            return tuple(result.unflatten(0, (size, -1)) for result in results), tuple(0 for _ in results)

        self.batching = rule

    def _run_abstract(self, *operands: Any, **params: Any) -> Any:
        assert self.abstract is not None, f"primitive {self.name} has no abstract rule"
        return self.abstract(*operands, **params)

    def _may_be_none(self, name: str) -> bool:
        cotangent = name.startswith("d") and name[1:] in self.results
        return cotangent or name in _optional(self.op)

    def _gradients_like_operands(self, reads: Sequence[str], gives: Sequence[str]) -> Callable:
        def abstract(*operands: Any, **params: Any) -> Any:
            given = dict(zip(reads, operands, strict=True))
            likes = [given[name[1:]] for name in gives]
            first = next(operand for operand in operands if operand is not None)
            results = tuple(
                first.new_empty(0) if like is None else torch.empty(like.shape, dtype=like.dtype, device=like.device)
                for like in likes
            )
            return results if len(results) > 1 else results[0]

        for name in gives:
            if name[1:] not in reads:  # the backward does not read the operand, so its rule must say what the gradient looks like
                return _no_abstract_rule(self.name)
        return abstract


@dataclass(frozen=True)
class _Vjp:
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    fn: Callable


def primitive_of(target: Any) -> Primitive | None:
    """The primitive behind an FX target, or None if it is another op."""
    if getattr(target, "namespace", None) != "mpar":
        return None
    name = target._schema.name.removeprefix("mpar::")
    if name not in PRIMITIVES:
        raise UnknownNameError(f"op {target} is not a registered primitive")
    return PRIMITIVES[name]


def _make_function(primitive: Primitive) -> type[torch.autograd.Function]:
    """The autograd Function around `primitive`; its flat arguments are the operands, then the parameters in order."""
    num_operands, keys = len(primitive.operands), tuple(primitive.params)

    def split(flat: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return flat[:num_operands], dict(zip(keys, flat[num_operands:], strict=True))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*flat: Any) -> Any:
            operands, params = split(flat)
            return primitive.op(*operands, **params)

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.set_materialize_grads(False)
            operands, ctx.params = split(inputs)
            results = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
            vjp = primitive._vjp
            if vjp is not None:
                values = dict(zip(primitive.operands, operands, strict=True)) | dict(zip(primitive.results, results, strict=True))
                ctx.names = [name for name in vjp.reads if isinstance(values.get(name), Tensor)]
                ctx.save_for_backward(*(values[name] for name in ctx.names))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            vjp = primitive._vjp
            if vjp is None:
                raise _no_gradient(primitive)
            if all(dy is None for dy in cotangents):
                return (None,) * (num_operands + len(keys))
            values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            values |= {f"d{name}": dy for name, dy in zip(primitive.results, cotangents, strict=True)}
            grads = vjp.fn(*(values.get(name) for name in vjp.reads), **ctx.params)
            by_name = dict(zip(vjp.gives, grads if isinstance(grads, tuple) else (grads,), strict=True))
            needs = ctx.needs_input_grad
            return *(by_name.get(f"d{n}") if needs[i] else None for i, n in enumerate(primitive.operands)), *(None for _ in keys)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[Any], *flat: Any) -> Any:
            operands, params = split(flat)
            if primitive.batching is None:
                raise DifferentiationError(f"cannot vmap {primitive.name}: it has no batching rule")
            return primitive.batching(info.batch_size, in_dims[:num_operands], *operands, **params)

    Function.__name__ = Function.__qualname__ = primitive.name
    return Function


def _no_gradient(primitive: Primitive) -> DifferentiationError:
    second = " (it is itself a gradient; second derivatives stop here)" if primitive.name.endswith("_bwd") else ""
    return DifferentiationError(
        f"cannot differentiate {primitive.name}: it has no gradient rule{second}.\n"
        "Detach its operands, or write the function with ops that can be differentiated again."
    )


def _loop_batching(primitive: Primitive) -> Callable:
    def rule(size: int, dims: Sequence[int | None], *operands: Any, **params: Any) -> Any:
        per_example = []
        for i in range(size):
            example = [x if d is None else x.select(d, i) for x, d in zip(operands, dims, strict=True)]
            per_example.append(primitive.bind(*example, **params))
        if isinstance(per_example[0], Tensor):
            return torch.stack(per_example), 0
        return tuple(torch.stack(column) for column in zip(*per_example, strict=True)), tuple(0 for _ in per_example[0])

    return rule


def _no_abstract_rule(name: str) -> Callable:
    def abstract(*operands: Any, **params: Any) -> Any:
        raise AssertionError(f"{name}_bwd does not read an operand whose gradient it gives: define its abstract rule")

    return abstract


def _leading(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _without_data(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return [_without_data(item) for item in x] if isinstance(x, (list, tuple)) else x


def _optional(op: Any) -> frozenset[str]:
    return frozenset(a.name for a in op._schema.arguments if str(a.type) == "Optional[Tensor]")


def _schema(operands: str, results: str, params: dict[str, str]) -> str:
    def tensor(part: str) -> str:
        part = part.strip()
        if part.endswith("[]"):
            return f"Tensor[] {part[:-2]}"
        return f"Tensor? {part[:-1]}" if part.endswith("?") else f"Tensor {part}"

    left = ", ".join(tensor(part) for part in operands.split(",") if part.strip())
    keywords = ", ".join(f"{kind} {name}" for name, kind in params.items())
    right = ", ".join("Tensor[]" if part.strip().endswith("[]") else "Tensor" for part in results.split(","))
    arguments = ", ".join(part for part in (left, f"*, {keywords}" if keywords else "") if part)
    return f"({arguments}) -> {f'({right})' if ',' in right else right}"


def parse_sharding(
    rule: str,
    *,
    need_replication: str = "",
    linear: str = "",
    follows: str = "",
    as_is: str = "",
    ragged: str = "",
    leads: str = "",
    sizes: str = "",
) -> ShardingRule:
    """The rule written as `"b s d, d f -> b s f"`, one entry per operand and result; `_` is a dim without factors.

    Words are separated by blanks; `follows`, `ragged` and `sizes` are written as `"m:s"`.
    """
    operands, results = (tuple(_parse_dims(part) for part in side.split(",")) for side in rule.split("->"))
    whole, once = frozenset(need_replication.split()), frozenset(linear.split())
    lead, known = frozenset(leads.split()), tuple((name, int(size)) for name, size in _pairs(sizes))
    return ShardingRule(operands, results, whole, once, _pairs(follows), frozenset(as_is.split()), _pairs(ragged), lead, known)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, _, right in (word.partition(":") for word in text.split()))


def _parse_dims(part: str) -> tuple[tuple[str, ...], ...]:
    """`"b s (k g) h"` -> `(("b",), ("s",), ("k", "g"), ("h",))`; `"..."` stays a dim of its own until the rank is known."""
    found = re.findall(r"\(([^)]*)\)|(\S+)", part)
    return tuple(tuple(group.split()) if group else () if name == "_" else (name,) for group, name in found)
