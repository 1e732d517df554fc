"""Primitive: an op and all its rules in one object. Its forward is one node of a graph, and so is its backward.

Every primitive is a torch op `mpar::<name>`. The `torch.autograd.Function` around it serves `torch.func.grad`, `vjp`, `vmap` and
`.backward()`. Tracing does not look into the op, so it sees one node. The kernel that torch calls runs the abstract rule first,
so that wrong operands raise the same error eagerly as while tracing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from mpar.errors import ConfigError, ShardingError
from mpar.op_shape import AttentionShape, MatmulShape
from mpar.ops.primitive._autograd import (
    Operand,
    Static,
    Transforms,
    Vjp,
    gradients_like_operands,
    make_function,
    no_gradient,
    second_vjp,
)
from mpar.ops.primitive._batching import BatchingRule, Results, batch_by_loop, batch_folded, batch_leading
from mpar.ops.primitive._declaration import check_name, check_rule, check_rule_text
from mpar.ops.primitive._sharding_rule import Placement, ShardingRule, parse_sharding
from mpar.ops.primitive._signature import parse_signature

__all__ = ["PRIMITIVES", "Cost", "Primitive", "primitive_of"]

PRIMITIVES: dict[str, "Primitive"] = {}
_BY_OP: dict[object, "Primitive"] = {}
_LIBRARY = torch.library.Library("mpar", "DEF")


@dataclass(frozen=True)
class Cost:
    """What one call costs: floating-point operations, bytes read and written, bytes of workspace freed before it returns.

    transcendentals:   exponentials and the like, which are no FLOPs. Those inside attention are not counted.
    matmul, attention: the shape of a product or of attention, from which its rate is predicted.
    """

    flops: int
    bytes: int
    workspace: int = 0
    transcendentals: int = 0
    matmul: MatmulShape | None = None
    attention: AttentionShape | None = None


class Primitive:
    """An op named `name`, whose tensor operands and results are those of `signature`, such as `"x, weight? -> y"`.

    An operand with `?` may be None; one with `[]` is a list of tensors. `params` are the static keyword arguments, with their
    types in torch's schema language (`eps="float"`). In a rank graph an `int` parameter may be a value that is known only at run
    time (the offset of a shard), so implementations must not specialise on it.

    `mutates` names the operands that the implementation overwrites, the first of them with its last results. `asks_host` says
    that the implementation reads data on the host. `opaque` says that code which Inductor compiles calls the implementation as it
    is, as it does where the host is asked: it cannot be traced, or takes less memory or time than what Inductor would make.
    """

    opaque = False

    def __init__(self, name: str, signature: str, **params: str) -> None:
        check_name(name, signature, PRIMITIVES)
        self.name = name
        self.signature = parse_signature(signature, params)
        self.abstract: Callable | None = None
        self.impl: Callable | None = None
        self.cost: Callable[..., Cost] | None = None
        self.bwd: Any = None  # def_vjp makes it a Primitive; Any, because type checkers cannot know that
        self.transforms = Transforms()
        self.placement = Placement()
        self.mutates: tuple[str, ...] = ()
        self.asks_host = False
        try:
            _LIBRARY.define(f"{name}{self.signature.schema}")
        except RuntimeError as error:
            kinds = ", ".join(f"{key}={kind!r}" for key, kind in params.items())
            raise ConfigError(
                f"cannot declare primitive {name!r} with the parameters {kinds}: torch has no such types, as it says:\n"
                + "\n".join(str(error).strip().splitlines()[:3])
            ) from None
        torch.library.register_fake(f"mpar::{name}", self._run_abstract, lib=_LIBRARY)
        self.op = getattr(torch.ops.mpar, name).default
        self._function = make_function(name, self.op, self.signature, self.transforms)
        PRIMITIVES[name] = _BY_OP[self.op] = self

    def __repr__(self) -> str:
        return f"Primitive({self.name})"

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        return self.signature.operands

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        return self.signature.results

    @property
    def params(self) -> dict[str, str]:
        """The static parameters and their types in torch's schema language."""
        return self.signature.params

    def bind(self, *operands: Operand, **params: Static) -> Any:
        """Apply the primitive; `params` must name every static parameter. Returns a tensor, or a tuple if it has many results.

        An operand that only stands for a tensor is given the call by `__torch_function__`, as torch's own functions do it.
        """
        if has_torch_function(operands):
            return handle_torch_function(self.bind, operands, *operands, **params)
        if self.signature.takes_lists:
            tensors = [x for given in operands for x in ([given] if given is None or isinstance(given, Tensor) else given)]
            if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
                raise no_gradient(self.name)
        if self.signature.takes_lists or (self.transforms.batching is None and self.transforms.vjp is None):
            return self.op(*operands, **params)
        return self._function.apply(*operands, *(params[key] for key in self.params))

    def def_abstract(self, fn: Callable) -> Callable:
        """`fn(*operands, **params)` checks its operands and returns results without data: their shapes, dtypes and strides."""
        self.abstract = fn
        return fn

    def def_impl(self, fn: Callable) -> Callable:
        """`fn(*operands, **params)` is the meaning of the op on plain tensors."""
        self.impl = fn
        self.def_impl_on("CompositeExplicitAutograd", fn)
        return fn

    @property
    def meaning(self) -> Callable:
        """The function that `def_impl` was given, for implementations that are made of others."""
        assert self.impl is not None, f"{self} has no implementation"
        return self.impl

    def def_impl_on(self, key: str, fn: Callable) -> None:
        """`fn` is called for tensors of torch's dispatch key, such as "CUDA"; it must reproduce the meaning of the op."""

        def checked(*operands: Operand, **params: Static) -> object:
            self._run_abstract(*(_without_data(operand) for operand in operands), **params)
            return fn(*operands, **params)

        _LIBRARY.impl(self.name, checked, key)

    def def_vjp(self, signature: str) -> Callable[[Callable], Callable]:
        """Define the gradient as a new primitive `<name>_bwd`, whose signature is such as `"x, y, dy -> dx"`.

        Its operands are operands of this primitive (`x`), results (`y`) and cotangents of results (`dy`); what is not named is
        not kept for the backward. Its results are gradients of operands; operands that are not named have no gradient. The
        decorated function is the implementation of `<name>_bwd`; a cotangent that the caller does not have is None. Its abstract
        rule is defined too: each gradient has the shape and dtype of its operand and is contiguous, and that of an operand that
        is None is `first operand.new_empty(0)`.
        """

        def register(fn: Callable) -> Callable:
            self.bwd, self.transforms.vjp = self._gradient(f"{self.name}_bwd", signature, fn)
            return fn

        return register

    def def_vjp_part(self, signature: str) -> Callable[[Callable], "Primitive"]:
        """Define some of the gradients, for less than all of them cost, as a new primitive `<name>_<operands>_bwd`, such as
        `linear_cross_entropy_x_bwd`. A backward that needs no others calls it. After `def_vjp`, of which it reads no more.
        """

        def register(fn: Callable) -> Primitive:
            which = "_".join(gradient[1:] for gradient in _names(signature)[1])
            primitive, rule = self._gradient(f"{self.name}_{which}_bwd", signature, fn)
            assert self.transforms.vjp is not None and set(rule.reads) <= set(self.transforms.vjp.reads)
            self.transforms.parts.append(rule)
            return primitive

        return register

    def _gradient(self, name: str, signature: str, fn: Callable) -> tuple["Primitive", Vjp]:
        """A new primitive that gives gradients of this one, and the rule that calls it."""
        reads, gives = _names(signature)
        operands = ", ".join(f"{read}?" if self._may_be_none(read) else read for read in reads)
        primitive = Primitive(name, f"{operands} -> {', '.join(gives)}", **self.params)
        primitive.def_impl(fn)
        primitive.def_abstract(gradients_like_operands(self.name, reads, gives))
        primitive.def_batching_loop()
        self.transforms.gradients.append((primitive.signature, primitive.transforms))
        return primitive, Vjp(reads, gives, primitive.bind)

    def def_formula(self, fn: Callable[..., Results]) -> Callable[..., Results]:
        """`fn` computes what the op means by torch's differentiable ops alone, from the same operands. After `def_vjp`.

        It is there for second derivatives: the derivative of `<name>_bwd` is that of the gradient of `fn`.
        """
        assert self.transforms.gradients, f"{self} has no gradient rule yet"
        for signature, transforms in self.transforms.gradients:
            transforms.vjp = second_vjp(signature, self.signature, fn)
        return fn

    def def_vjp_by_ops(self, signature: str) -> Callable[[Callable], Callable]:
        """Like `def_vjp`, but the function is made of differentiable ops: no new primitive, and higher derivatives exist."""

        def register(fn: Callable) -> Callable:
            self.transforms.vjp = Vjp(*_names(signature), fn)
            return fn

        return register

    def def_sharding(self, rule: str, **extras: str) -> None:
        """State the factors of every dim, such as `"... d, d -> ... d"`. The entry of an operand that is None is skipped.

        extras: keyword arguments of `parse_sharding`: need_replication, linear, follows, as_is, ragged, leads, sizes.
        """
        check_rule_text(self.name, rule)
        self.placement.rule = self._check_rule(parse_sharding(rule, **extras))

    def def_sharding_from(self, fn: Callable[..., ShardingRule]) -> Callable[..., ShardingRule]:
        """`fn(**params) -> ShardingRule` gives the rule of an op whose dims depend on its parameters, such as einsum."""
        self.placement.rule = fn
        return fn

    def sharding_rule(self, **params: Static) -> ShardingRule:
        """The sharding rule for these static parameters."""
        rule = self.placement.rule
        if rule is None:
            raise ShardingError(f"primitive {self.name!r} has no sharding rule: declare one with def_sharding")
        return rule if isinstance(rule, ShardingRule) else self._check_rule(rule(**params))

    def def_sharded(self, factor: str) -> Callable[[Callable], Callable]:
        """`fn(emit, *operands, **params)` is the local program if `factor` is sharded; `emit` is an `Emitter`.

        If several factors with a local program are sharded, the program that was defined first is used.
        """

        def register(fn: Callable) -> Callable:
            self.placement.sharded[factor] = fn
            return fn

        return register

    def def_lowered(self, fn: Callable) -> Callable:
        """`fn(emit, *operands, **params)` is always the local program, even on one rank: the op stands for several others."""
        self.placement.lowered = fn
        return fn

    def def_cost(self, fn: Callable[..., Cost]) -> Callable[..., Cost]:
        """`fn(*operands, **params) -> Cost` gives the cost of a call; the operands have no data."""
        self.cost = fn
        return fn

    def def_batching(self, fn: BatchingRule) -> BatchingRule:
        """`fn(size, dims, *operands, **params) -> (results, dims of results)`; `dims` has each operand's batched dim, or None."""
        self.transforms.batching = fn
        return fn

    def def_batching_loop(self) -> None:
        """Batch by a loop over examples whose results are stacked: for ops that cannot take one more dim."""
        self.transforms.batching = batch_by_loop(self.bind)

    def def_batching_leading(self) -> None:
        """Batch by one more leading dim, for every operand whose sharding rule starts with `...`. If another operand is batched,
        the op is applied to one example after the other."""
        self.transforms.batching = batch_leading(self.bind, self.sharding_rule)

    def def_batching_folded(self) -> None:
        """Batch by folding the batch into dim 0, for every operand whose sharding rule starts with the first factor of the first
        operand (`b`). If another operand is batched, the op is applied to one example after the other."""
        self.transforms.batching = batch_folded(self.bind, self.sharding_rule)

    def _check_rule(self, rule: ShardingRule) -> ShardingRule:
        check_rule(self.name, rule, self.operands, self.results)
        return rule

    def _run_abstract(self, *operands: Operand, **params: Static) -> Any:
        if self.abstract is None:
            raise ConfigError(f"primitive {self.name!r} has no abstract rule: say with def_abstract what its results are like")
        return self.abstract(*operands, **params)

    def _may_be_none(self, name: str) -> bool:
        cotangent = name.startswith("d") and name[1:] in self.results
        return cotangent or name in self.signature.optional


def primitive_of(target: object) -> Primitive | None:
    """The primitive behind an FX target, or None if it is another op."""
    return _BY_OP.get(target)


def _names(signature: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads, gives = (tuple(part.strip() for part in side.split(",")) for side in signature.split("->"))
    return reads, gives


def _without_data(x: Operand) -> Operand:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return None if x is None else [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in x]
