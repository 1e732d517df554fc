"""Einsum: the contraction of two tensors. Every matrix product of a model is one. Letters that the result lacks are summed."""

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._matmul import matmul
from mpar.ops._packed_matrix import PackedMatrix
from mpar.ops._product import add_product, product
from mpar.ops.primitive import Cost, Primitive, ShardingRule

__all__ = ["einsum"]

einsum_p = Primitive("einsum", "a, b -> y", equation="str")
einsum_add_p = Primitive("einsum_add", "x, a, b -> y", equation="str")
"""`x + einsum(equation, a, b)`, rounded once where that is faster. The compiler makes it of sums of products."""
einsum_add_over_p = Primitive("einsum_add_over", "x, a, b -> y", equation="str")
"""The same, written over x."""
einsum_add_over_p.mutates = ("x",)
_FEWEST_COLUMNS = 16
"""MKL multiplies matrices of float32 whose product has fewer columns, such as those of adapters, at a third to a fifth of the
speed of their transposes: 2048 x 256 times 256 x 8 takes 0.60 ms on one core of an AMD EPYC, in place of 0.18."""


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Contract `operands` by `equation`, such as `"bsd,df->bsf"`: one letter per dim; letters that the result lacks are summed.

    Operands share one floating dtype, which the result has too; the result is contiguous. More than two operands are contracted
    from left to right. There is no broadcasting and no `...`, and a letter is at most once in each operand and in the result.
    Raises ShapeError if the equation is malformed or sizes disagree, DtypeError if dtypes do.
    """
    equation = equation.replace(" ", "")
    inputs, output = _split(equation, len(operands))
    if len(operands) == 1:
        return _einsum_of_one(equation, inputs[0], output, operands[0])
    y, letters = operands[0], inputs[0]
    for index in range(1, len(operands) - 1):
        later = "".join(inputs[index + 1 :]) + output
        kept = "".join(c for c in dict.fromkeys(letters + inputs[index]) if c in later)
        y, letters = einsum_p.bind(y, operands[index], equation=f"{letters},{inputs[index]}->{kept}"), kept
    return einsum_p.bind(y, operands[-1], equation=f"{letters},{inputs[-1]}->{output}")


def _split(equation: str, num_operands: int) -> tuple[list[str], str]:
    left, arrow, output = equation.partition("->")
    inputs = left.split(",")
    problems = []
    if not arrow or not all(part.isascii() and (part.isalpha() or not part) for part in [*inputs, output]):
        problems.append("it must be like 'ab,bc->ac': letters, commas, one '->'")
    if len(inputs) != num_operands or not num_operands:
        problems.append(f"it has {len(inputs)} operands, {num_operands} are given")
    repeated = [part for part in [*inputs, output] if len(set(part)) != len(part)]
    if repeated:
        problems.append(f"a letter is repeated in {repeated}; take diagonals with torch.diagonal first")
    unknown = sorted(set(output) - set(left))
    if unknown:
        problems.append(f"letters {unknown} of the result are in no operand; expand the result afterwards")
    if problems:
        raise ShapeError(f"einsum: cannot use equation {equation!r}:\n" + "\n".join(problems))
    return inputs, output


def _einsum_of_one(equation: str, letters: str, output: str, x: Tensor) -> Tensor:
    if x.ndim != len(letters):
        raise ShapeError(f"einsum {equation!r}: the operand {tuple(x.shape)} has {x.ndim} dims, the equation {len(letters)}")
    summed = [i for i, c in enumerate(letters) if c not in output]
    kept = [c for c in letters if c in output]
    x = x.sum(summed) if summed else x
    return x.permute([kept.index(c) for c in output]).contiguous()


@einsum_p.def_abstract
def _abstract(a, b, *, equation):
    (in_a, in_b), output = _split(equation, 2)
    problems = [
        f"operand {name} {tuple(x.shape)} has {x.ndim} dims, '{letters}' has {len(letters)}"
        for name, x, letters in (("a", a, in_a), ("b", b, in_b))
        if x.ndim != len(letters)
    ]
    sizes_a, sizes_b = dict(zip(in_a, a.shape, strict=False)), dict(zip(in_b, b.shape, strict=False))
    for letter in sizes_a:
        if letter in sizes_b and sizes_a[letter] != sizes_b[letter]:
            problems.append(f"letter {letter!r} has size {sizes_a[letter]} in a and {sizes_b[letter]} in b")
    if problems:
        raise ShapeError(f"einsum {equation!r} of {tuple(a.shape)} and {tuple(b.shape)}:\n" + "\n".join(problems))
    if a.dtype != b.dtype or not a.is_floating_point():
        raise DtypeError(f"einsum {equation!r}: a is {a.dtype}, b is {b.dtype}; both must have the same floating dtype: cast one")
    sizes = sizes_a | sizes_b
    return torch.empty([sizes[c] for c in output], dtype=a.dtype, device=a.device)


@einsum_p.def_impl
def _impl(a: Tensor, b: Tensor, *, equation: str) -> Tensor:
    if type(b) is PackedMatrix:
        (in_a, in_b), output = _split_known(equation)
        product = b.einsum(a, in_a, in_b, output)
        if product is not None:
            return product
        b = b.plain()
    contract = _plan_of(equation, a, b)
    assert contract is not None
    return contract(a, b)


def _plan_of(equation: str, a: Tensor, b: Tensor, *, adds: bool = False) -> Callable | None:
    """See `_plan`."""
    fewest = _FEWEST_COLUMNS if a.dtype == torch.float32 and a.device.type == "cpu" else 0
    if adds and (type(b) is PackedMatrix or type(a) is PackedMatrix):
        return None
    return _plan(equation, a.shape, a.stride(), b.shape, b.stride(), fewest, adds)


@einsum_add_p.def_abstract
@einsum_add_over_p.def_abstract
def _abstract_add(x, a, b, *, equation):
    y = _abstract(a, b, equation=equation)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ShapeError(f"einsum_add {equation!r}: x is {x.dtype} {tuple(x.shape)}, the product is {y.dtype} {tuple(y.shape)}")
    return y


@einsum_add_p.def_impl
def _impl_add(x: Tensor, a: Tensor, b: Tensor, *, equation: str) -> Tensor:
    return _impl_add_over(x.clone(memory_format=torch.contiguous_format), a, b, equation=equation)


@einsum_add_over_p.def_impl
def _impl_add_over(x: Tensor, a: Tensor, b: Tensor, *, equation: str) -> Tensor:
    plan = _plan_of(equation, a, b, adds=True)
    return x.add_(_impl(a, b, equation=equation)) if plan is None else plan(x, a, b)


_split_known = lru_cache(maxsize=256)(lambda equation: _split(equation, 2))


@lru_cache(maxsize=4096)
def _plan(
    equation: str,
    shape_a: Sequence[int],
    stride_a: Sequence[int],
    shape_b: Sequence[int],
    stride_b: Sequence[int],
    fewest_columns: int,
    adds: bool,
) -> Callable | None:
    """The function that contracts operands of these shapes and strides: first it sums letters of one operand only, then it calls
    mm, bmm or mul once. A matrix product with fewer than `fewest_columns` may be computed as its transpose.

    adds: the function is given x before them, and adds their product to it; None if that is not one call."""
    (in_a, in_b), output = _split(equation, 2)
    sizes = dict(zip(in_a + in_b, (*shape_a, *shape_b), strict=True))
    only_a, only_b = _alone(in_a, in_b + output), _alone(in_b, in_a + output)
    if adds and (only_a or only_b or all(c in output for c in in_a + in_b)):
        return None
    if only_a or only_b:
        kept_a, kept_b = "".join(c for c in in_a if c not in only_a), "".join(c for c in in_b if c not in only_b)
        dims_a, dims_b = [in_a.index(c) for c in only_a], [in_b.index(c) for c in only_b]
        equation_after_sums = f"{kept_a},{kept_b}->{output}"

        def sum_first(a: Tensor, b: Tensor) -> Tensor:
            return _impl(a.sum(dims_a) if dims_a else a, b.sum(dims_b) if dims_b else b, equation=equation_after_sums)

        return sum_first
    if all(c in output for c in in_a + in_b):
        return _multiply(in_a, in_b, output)
    strides_a, strides_b = dict(zip(in_a, stride_a, strict=True)), dict(zip(in_b, stride_b, strict=True))
    if _first_of(output, in_a, in_b) == "b":  # the operand with the first letter of the result that is not in both gives its rows
        contract = _contract(in_b, strides_b, in_a, strides_a, output, sizes, fewest_columns, adds)
        if contract is None:
            return None
        return (lambda x, a, b: contract(x, b, a)) if adds else (lambda a, b: contract(b, a))
    return _contract(in_a, strides_a, in_b, strides_b, output, sizes, fewest_columns, adds)


def _alone(letters: str, others: str) -> str:
    return "".join(c for c in letters if c not in others)


def _first_of(output: str, in_a: str, in_b: str) -> str:
    return next(("b" if c in in_b else "a" for c in output if (c in in_a) != (c in in_b)), "a")


def _multiply(in_a: str, in_b: str, output: str) -> Callable:
    """Multiply element by element: no letter is summed. Both operands are permuted to the order of the result and broadcast."""

    def spread(x: Tensor, letters: str) -> Tensor:
        x = x.permute([letters.index(c) for c in output if c in letters])
        return x[tuple(slice(None) if c in letters else None for c in output)]

    return lambda a, b: torch.mul(spread(a, in_a), spread(b, in_b)).contiguous()


def _contract(
    in_a: str,
    strides_a: dict[str, int],
    in_b: str,
    strides_b: dict[str, int],
    output: str,
    sizes: dict[str, int],
    fewest_columns: int,
    adds: bool,
) -> Callable | None:
    """y[batch, rows, columns] = sum over inner of a[batch, rows, inner] * b[batch, inner, columns]; adds: see `_plan`."""
    batch = "".join(c for c in output if c in in_a and c in in_b)
    rows = "".join(c for c in output if c in in_a and c not in in_b)
    columns = "".join(c for c in output if c in in_b and c not in in_a)
    inner = "".join(c for c in in_a if c in in_b and c not in output)
    other = "".join(c for c in in_b if c in inner)
    # the summed letters may be in any order: take one that needs no copy of either operand, if there is one
    inner = max((inner, other), key=lambda order: _mergeable(order, strides_a, sizes) + _mergeable(order, strides_b, sizes))
    groups_a, groups_b = [rows, inner], [inner, columns]
    if batch:
        groups_a, groups_b = [batch, *groups_a], [batch, *groups_b]
    view_a, view_b = _matrix(in_a, groups_a, strides_a, sizes), _matrix(in_b, groups_b, strides_b, sizes)
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.bmm if batch else product
    if not batch and math.prod(sizes[c] for c in columns) < fewest_columns <= math.prod(sizes[c] for c in rows):
        multiply = _thin_mm
    natural = batch + rows + columns
    shape = [sizes[c] for c in natural]
    if adds:
        if natural != output or multiply is _thin_mm:
            return None
        add: Callable[[Tensor, Tensor, Tensor], Tensor] = Tensor.baddbmm_ if batch else add_product
        matrix = [math.prod(sizes[c] for c in group) for group in ([batch] if batch else []) + [rows, columns]]
        return lambda x, a, b: add(x.view(matrix), view_a(a), view_b(b)).view(shape)
    if natural == output:
        if len(output) == (3 if batch else 2) and len(rows) == len(columns) == 1:
            return lambda a, b: multiply(view_a(a), view_b(b))
        return lambda a, b: multiply(view_a(a), view_b(b)).view(shape)
    order = [natural.index(c) for c in output]
    return lambda a, b: multiply(view_a(a), view_b(b)).view(shape).permute(order).contiguous()


def _thin_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, by MKL that of their transposes."""
    found = matmul(a, b)
    return torch.mm(b.T, a.T).T.contiguous() if found is None else found


def _matrix(letters: str, groups: list[str], strides: dict[str, int], sizes: dict[str, int]) -> Callable[[Tensor], Tensor]:
    """The function that gives its operand one dim per group of letters: a view if the strides allow it, else a copy."""
    shape = [math.prod(sizes[c] for c in group) for group in groups]
    if all(_mergeable(group, strides, sizes) for group in groups):
        if list(letters) == groups:
            return lambda x: x
        merged = [next((strides[c] for c in reversed(group) if sizes[c] != 1), 1) for group in groups]
        return lambda x: torch.as_strided(x, shape, merged)
    order = [letters.index(c) for c in "".join(groups)]
    return lambda x: x.permute(order).reshape(shape)


def _mergeable(group: str, strides: dict[str, int], sizes: dict[str, int]) -> bool:
    steps = [(sizes[c], strides[c]) for c in group if sizes[c] != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


@einsum_p.def_vjp_by_ops("a, b, dy -> da, db")
def _vjp(a, b, dy, *, equation):
    (in_a, in_b), output = _split(equation, 2)
    return _pull_back(dy, b, output, in_b, in_a, a.shape), _pull_back(dy, a, output, in_a, in_b, b.shape)


def _pull_back(dy: Tensor, other: Tensor, output: str, in_other: str, letters: str, shape: Sequence[int]) -> Tensor:
    """The gradient of the operand with `letters`. It is constant along letters that only this operand has, which were summed."""
    present = "".join(c for c in letters if c in in_other + output)
    gradient = einsum_p.bind(dy, other, equation=f"{output},{in_other}->{present}")
    if present == letters:
        return gradient
    return gradient[tuple(slice(None) if c in present else None for c in letters)].expand(shape)


@einsum_p.def_sharding_from
def _sharding(*, equation: str) -> ShardingRule:
    (in_a, in_b), output = _split(equation, 2)
    a, b, y = (tuple((c,) for c in letters) for letters in (in_a, in_b, output))
    return ShardingRule((a, b), (y,), frozenset(), frozenset({"a", "b"}))


@einsum_add_p.def_sharding_from
@einsum_add_over_p.def_sharding_from
def _sharding_add(*, equation: str) -> ShardingRule:
    product = _sharding(equation=equation)
    inputs, _, output = equation.partition("->")
    summed = frozenset(inputs) - {",", *output}  # the product would be a pending sum, but x is none
    return ShardingRule((product.results[0], *product.operands), product.results, summed, frozenset())


@einsum_p.def_cost
def _cost(a, b, *, equation):
    (in_a, in_b), output = _split(equation, 2)
    sizes = dict(zip(in_a + in_b, (*a.shape, *b.shape), strict=True))
    result = math.prod(sizes[c] for c in output) * a.element_size()
    shape = MatmulShape(
        batch=math.prod(sizes[c] for c in output if c in in_a and c in in_b),
        m=math.prod(sizes[c] for c in output if c not in in_b),
        n=math.prod(sizes[c] for c in output if c not in in_a),
        k=math.prod(sizes[c] for c in sizes if c not in output),
    )
    return Cost(flops=2 * math.prod(sizes.values()), bytes=a.nbytes + b.nbytes + result, matmul=shape)


@einsum_add_p.def_cost
@einsum_add_over_p.def_cost
def _cost_add(x, a, b, *, equation):
    cost = _cost(a, b, equation=equation)
    return replace(cost, bytes=cost.bytes + x.nbytes)


einsum_add_p.def_batching_loop()
einsum_add_over_p.def_batching_loop()


@einsum_p.def_batching
def _batching(size, dims, a, b, *, equation):
    (in_a, in_b), output = _split(equation, 2)
    letter = next(c for c in string.ascii_letters if c not in equation)
    (a, in_a), (b, in_b) = (
        (x, letters) if dim is None else (x.movedim(dim, 0), letter + letters)
        for x, letters, dim in ((a, in_a, dims[0]), (b, in_b, dims[1]))
    )
    return einsum_p.bind(a, b, equation=f"{in_a},{in_b}->{letter}{output}"), 0
