"""Pass through: rules of ops of torch that work across some dims of their tensors and treat the indices of all others alone.

There are two ways to write such a rule as data. `Across` names the arguments of the op that hold the dims it works across, or
says how many of the last dims these are. `Pattern` writes the dims of all tensors in letters: `"b i *, o i * -> b o *"`. The
table is in `_torch_ops.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._local_programs import argument
from mpar.sharding._rules import Factors, NodeRule, replicated

__all__ = ["Across", "Pattern", "fitted", "named_operands", "values_of"]

Localise = Callable[[tuple, dict, list[tuple[int, ...]]], tuple[tuple, dict]]


@dataclass(frozen=True)
class Across:
    """The rule of an op whose tensors have the same dims, in the same order.

    A tensor may lack the dims that the op works across, as the result of a reduction does; or it may have one new dim, the last,
    in their place, as a diagonal has, or beside them, as windows have. Any other tensor is replicated.

    dims:       the names of the arguments that hold dims, where None stands for all; or the number of last dims.
    of:         whose dims these are: those of the first operand, or those of the "result".
    replicated: operands that no dim of is sharded, though their number of dims might say otherwise.
    linear:     operands in each of which the op is linear while the others are held fixed.
    jointly:    whether the op is linear in all operands together.
    sized:      the argument that holds the sizes of the result.
    """

    dims: str | int = "dim"
    of: str = "operand"
    replicated: str = ""
    linear: str = ""
    jointly: bool = False
    sized: str = ""

    def __call__(self, node: fx.Node) -> NodeRule:
        """The rule of `node`."""
        named, values = named_operands(node), values_of(node)
        ndim = len(shape_of(named[0][1] if self.of == "operand" else node))
        crossed = self.crossed(node, ndim)

        def factors(value: Tensor | None, name: str = "") -> Factors:
            if value is None:
                return ()
            return ((),) * value.ndim if name in self.replicated.split() else _placed(value.ndim, ndim, crossed)

        return fitted(
            NodeRule(
                [operand for _, operand in named],
                [factors(operand.meta["val"], name) for name, operand in named],
                [factors(value) for value in values],
                {},
                linear={i for i, (name, _) in enumerate(named) if name in self.linear.split()},
                jointly=self.jointly,
                localise=_sizes_into(node, self.sized),
            ),
            values,
        )

    def crossed(self, node: fx.Node, ndim: int) -> set[int]:
        """The dims across which the op works."""
        if isinstance(self.dims, int):
            return set(range(max(ndim - self.dims, 0), ndim))
        given: list[int] = []
        for name in self.dims.split():
            value = argument(node, name)
            given += [value] if isinstance(value, int) else range(ndim) if value in (None, []) else value
        return {dim % max(ndim, 1) for dim in given}


@dataclass(frozen=True)
class Pattern:
    """The rule of an op whose tensors have dims in an order of their own, which `dims` writes in letters.

    There is one entry for each operand that the op may have, in the order of its arguments, and for each result. `_` is a dim
    that must not be sharded, `*` any number of such dims, `...` any number of dims that are independent. Dims of size 1 are
    broadcast. What a result lacks is summed over.

    linear: operands in each of which the op is linear while the others are held fixed.
    sized:  the argument that holds the sizes of the first result; or `"N:0"`, the one that holds the size of its dim 0.
    """

    dims: str
    linear: str = ""
    sized: str = ""

    def __call__(self, node: fx.Node) -> NodeRule:
        """The rule of `node`."""
        named, values = named_operands(node), values_of(node)
        left, right = ([part.split() for part in side.split(",")] for side in self.dims.split("->"))
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        written = dict(zip((known.name for known in arguments if "Tensor" in str(known.type)), left, strict=False))
        of_operands = [(written.get(name, ["*"]), operand.meta["val"].ndim) for name, operand in named]
        of_results = [(words, value.ndim) for words, value in zip(right, values, strict=True) if value is not None]
        if any(ndim < sum(word not in ("*", "...") for word in words) for words, ndim in (*of_operands, *of_results)):
            return replicated(node)
        longest = max(ndim - len(words) + 1 for words, ndim in (*of_operands, *of_results) if "..." in words or words is left[0])
        remaining = iter(_expanded(words, ndim, longest) for words, ndim in of_results)
        return fitted(
            NodeRule(
                [operand for _, operand in named],
                [_expanded(words, ndim, longest) for words, ndim in of_operands],
                [() if value is None else next(remaining) for value in values],
                {},
                linear={i for i, (name, _) in enumerate(named) if name in self.linear.split()},
                localise=_sizes_into(node, self.sized),
            ),
            values,
            broadcasts=True,
        )


def named_operands(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The tensor operands of a node in order, each with the name of its argument; items of a list have that of the list."""
    known = [known.name for known in node.target._schema.arguments]  # type: ignore[union-attr]
    given = [*zip(known, node.args, strict=False), *node.kwargs.items()]
    found = [(name, item) for name, value in given for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [(name, item) for name, item in found if isinstance(item, fx.Node) and isinstance(item.meta["val"], Tensor)]


def values_of(node: fx.Node) -> list[Tensor | None]:
    """The values of all results of a node; None for one that is not asked for, or is no tensor."""
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
    return [value if isinstance(value, Tensor) else None for value in values]


def fitted(rule: NodeRule, values: Sequence[Tensor | None], *, broadcasts: bool = False) -> NodeRule:
    """`rule` with the sizes of its factors, without those that have different sizes in different tensors.

    broadcasts: whether a dim of size 1 goes with any size; then the factor is taken from this dim alone.
    """
    shapes = [*map(shape_of, rule.operands), *(() if value is None else tuple(value.shape) for value in values)]
    sizes: dict[str, set[int]] = {}
    for dims, shape in zip((*rule.factors, *rule.results), shapes, strict=True):
        for names, size in zip(dims, shape, strict=True):
            for name in names if size > 1 or not broadcasts else ():
                sizes.setdefault(name, set()).add(size)
    rule.sizes = {name: size for name, known in sizes.items() if len(known) == 1 for size in known if size > 1}

    def kept(dims: Factors, shape: tuple[int, ...]) -> Factors:
        return tuple(
            names if size > 1 and set(names) <= rule.sizes.keys() else () for names, size in zip(dims, shape, strict=True)
        )

    fitting = [kept(dims, shape) for dims, shape in zip((*rule.factors, *rule.results), shapes, strict=True)]
    rule.factors, rule.results = fitting[: len(rule.operands)], fitting[len(rule.operands) :]
    return rule


def _placed(ndim: int, full: int, crossed: set[int]) -> Factors:
    """The factors of a tensor with `ndim` dims of an op on `full` dims, which works across the dims `crossed`."""
    kept = tuple((f"d{i}",) for i in range(full) if i not in crossed)
    every = tuple(() if i in crossed else (f"d{i}",) for i in range(full))
    by_number = {full + 1: (*every, ()), len(kept) + 1: (*kept, ()), len(kept): kept, full: every}
    return by_number.get(ndim, ((),) * ndim)


def _expanded(words: Sequence[str], ndim: int, longest: int) -> Factors:
    """The factors that the words of a pattern give to a tensor of `ndim` dims. `...` stands for at most `longest` dims."""
    variadic = ndim - len(words) + 1
    out: list[tuple[str, ...]] = []
    for word in words:
        if word == "...":
            out += ((f"leading{longest - variadic + i}",) for i in range(variadic))
        elif word == "*":
            out += [()] * variadic
        else:
            out.append(() if word == "_" else (word,))
    return tuple(out)


def _sizes_into(node: fx.Node, sized: str) -> Localise | None:
    """The function that puts local sizes into the arguments that `sized` names."""
    if not sized:
        return None
    name, _, factor = sized.partition(":")
    known = [known.name for known in node.target._schema.arguments]  # type: ignore[union-attr]

    def localise(args: tuple, kwargs: dict, shapes: list[tuple[int, ...]]) -> tuple[tuple, dict]:
        value = shapes[0][int(factor)] if factor else list(shapes[0])
        if name in kwargs:
            return args, {**kwargs, name: value}
        place = known.index(name)
        return (*args[:place], value, *args[place + 1 :]), kwargs

    return localise
