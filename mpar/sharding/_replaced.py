"""Replaced: functions of torch that are traced as others, which compute the same and do not look at data or take functions."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import TraceError
from mpar.sharding._control_functions import trace_cond, trace_map, trace_scan, trace_while_loop
from mpar.sharding._flex import flex_attention
from mpar.sharding._statistics import corrcoef, cov, fill_diagonal_
from mpar.torch_private import cond_op, flex_attention_op, map_op, scan_op, while_loop_op

__all__ = ["REPLACED"]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise TraceError("one_hot without num_classes makes a shape from the data of a tensor: give num_classes")
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _write_item(x: Tensor, index: Any, value: Any) -> None:
    number = isinstance(value, (int, float, complex)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not (isinstance(index, Tensor) and index.dtype == torch.bool and number):
        return Tensor.__setitem__(x, index, value)
    mask = index.reshape(*index.shape, *[1] * (x.ndim - index.ndim))
    x.masked_fill_(mask, value.reshape(()).to(x.dtype) if isinstance(value, Tensor) else value)
    return None


def _einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) < 3 or not _is_plain(equation, operands):
        return torch.einsum(equation, *operands)
    left, _, output = equation.replace(" ", "").partition("->")
    terms = list(zip(left.split(","), operands, strict=True))
    sizes = {letter: n for letters, x in terms for letter, n in zip(letters, x.shape, strict=True)}
    while len(terms) > 2:
        pairs = itertools.combinations(terms, 2)
        first, second = min(pairs, key=lambda pair: math.prod(sizes[c] for c in {*pair[0][0], *pair[1][0]}))
        terms = [term for term in terms if term is not first and term is not second]
        later = output + "".join(letters for letters, _ in terms)
        kept = "".join(c for c in dict.fromkeys(first[0] + second[0]) if c in later)
        terms.append((kept, ops.einsum(f"{first[0]},{second[0]}->{kept}", first[1], second[1])))
    (a, x), (b, y) = terms
    return ops.einsum(f"{a},{b}->{output}", x, y)


def _is_plain(equation: Any, operands: tuple) -> bool:
    """Whether `ops.einsum` has the equation: letters, all sizes of a letter alike, one floating dtype."""
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in operands) or torch.is_autocast_enabled("cpu"):
        return False
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    letters = [*zip("".join(inputs), (n for x in operands for n in x.shape), strict=False)]
    return (
        bool(arrow)
        and all(not term or (term.isalpha() and len(set(term)) == len(term)) for term in (*inputs, output))
        and [len(term) for term in inputs] == [x.ndim for x in operands]
        and len(set(letters)) == len({letter for letter, _ in letters})
        and set(output) <= set(left)
        and len({x.dtype for x in operands}) == 1
        and operands[0].dtype.is_floating_point
    )


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.one_hot: _one_hot,
    Tensor.__setitem__: _write_item,
    flex_attention_op: flex_attention,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.cov, Tensor.cov), cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), corrcoef),
    Tensor.fill_diagonal_: fill_diagonal_,
    cond_op: trace_cond,
    map_op: trace_map,
    scan_op: trace_scan,
    while_loop_op: trace_while_loop,
}
"""one_hot checks its operand; a write under a mask has a gradient of unknown shape; flex_attention and control flow take
functions; einsum flattens dims of three operands or more, and the pair with the least work comes first; cov and corrcoef look at
data; fill_diagonal_ writes by strides of memory."""
