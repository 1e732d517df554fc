"""Samples: calls of an operator, with torch's own examples of its arguments, as functions of the tensors in them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from mpar import tree, value_and_grad

__all__ = ["ENTRIES", "NOT_SAMPLED", "Sample", "calls_of"]

NOT_SAMPLED = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), "values are not defined"
    ),
    **dict.fromkeys(
        (
            "jiterator_2inputs_2outputs",
            "jiterator_4inputs_with_extra_args",
            "jiterator_binary",
            "jiterator_binary_return_by_ref",
            "jiterator_unary",
        ),
        "runs on GPUs only",
    ),
    "as_strided partial_views": "torch itself cannot run its samples on tensors of their own",
    "sparse.mm reduce": "operands are sparse",
    "sparse.sampled_addmm": "operands are sparse",
    "to_sparse": "results are sparse",
}
"""Entries whose numbers cannot be compared, and why."""


def _name(op: OpInfo) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


ENTRIES: dict[str, OpInfo] = {_name(op): op for op in op_db if torch.float64 in op.dtypes and _name(op) not in NOT_SAMPLED}
"""The entries of torch's table of operators that have samples in float64, by name; some operators have several."""


@dataclass(frozen=True)
class Sample:
    """A call of an operator, or its gradient, as a function of the tensors in its arguments."""

    label: str
    fn: Callable[..., object]
    tensors: tuple[Tensor, ...]


def calls_of(op: OpInfo, count: int) -> Iterator[Sample]:
    """At most `count` calls in float64 with something to shard, evenly taken from torch's, each with its gradient."""
    torch.manual_seed(0)
    found = []
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)):
        leaves, structure = tree.flatten((sample.input, *sample.args, dict(sample.kwargs)))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if any(leaves[i].numel() > 1 for i in places):
            tensors = tuple(leaves[i].detach().clone() for i in places)
            found.append(Sample(f"sample {number}", _call(op, leaves, structure, places), tensors))
    step = max(1, math.ceil(len(found) / count))
    for forward in found[step // 2 :: step][:count]:
        yield forward
        if op.supports_autograd and _differentiable(forward):
            yield Sample(f"gradient of {forward.label}", _gradient(forward), forward.tensors)


def _call(op: OpInfo, leaves: list, structure: object, places: list[int]) -> Callable[..., object]:
    def call(*tensors: Tensor) -> object:
        filled = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            filled[i] = x
        first, *args, kwargs = tree.unflatten(structure, filled)
        return op.op(first, *args, **kwargs)

    return call


def _gradient(forward: Sample) -> Callable[..., object]:
    """The gradients of a scalar of the results by the floating tensors, with a cotangent that differs everywhere."""

    def scalar(floats: list[Tensor], others: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        remaining, fixed = iter(floats), iter(others)
        out = forward.fn(*(next(remaining) if x.is_floating_point() else next(fixed) for x in forward.tensors))
        for result in tree.leaves(out):
            if isinstance(result, Tensor) and result.is_complex():
                result = torch.view_as_real(result.resolve_conj())
            if isinstance(result, Tensor) and result.is_floating_point():
                total = total + result.sin().sum()
        return total

    def gradient(*tensors: Tensor) -> object:
        floats = [x for x in tensors if x.is_floating_point()]
        return value_and_grad(scalar)(floats, [x for x in tensors if not x.is_floating_point()])

    return gradient


def _differentiable(forward: Sample) -> bool:
    """Whether plain torch can differentiate by all floating tensors: some ops take weights that have no gradient."""
    try:
        _gradient(forward)(*(x.clone() for x in forward.tensors))
    except RuntimeError:
        return False
    return True
