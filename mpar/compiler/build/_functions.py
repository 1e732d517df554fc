"""The small functions of a step, such as casts, sums and updates: each is compiled once, however often it is called."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.compiler.build._values import Values
from mpar.compiler.segment import Code, Target, compile_function, overwrite_operands
from mpar.ops import widen
from mpar.spec import P

__all__ = ["Functions"]

GraphPass = Callable[[fx.Graph], dict[str, int]]


@dataclass
class Functions:
    """The code of the small functions of a program.

    compiled: the code of all functions, by name, variant, shapes, specs and passes.
    sums:     the code of additions, by the shapes, dtypes and specs of what is added.
    """

    target: Target
    values: Values
    compiled: dict[Hashable, Code] = field(default_factory=dict)
    sums: dict[Hashable, Code] = field(default_factory=dict)

    def compile(
        self,
        name: str,
        fn: Callable[..., object],
        args: Sequence[object],
        in_specs: Sequence[P],
        out_specs: Sequence[P | None] | None,
        variant: Hashable = None,
        passes: Sequence[GraphPass] = (),
    ) -> Code:
        """The code of a small function, compiled on the first call.

        Two functions with the same `name` and `variant` count as the same function, so they must compute the same.
        """
        shapes = tuple((tuple(x.shape), x.dtype) for x in tree.leaves(args))
        out = None if out_specs is None else tuple(out_specs)
        key = (name, variant, shapes, tuple(in_specs), out, tuple(passes))
        if key not in self.compiled:
            self.compiled[key] = compile_function(name, fn, args, self.target, in_specs, out_specs, passes=passes)
        return self.compiled[key]

    def cast(self, name: str, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype], source: list[P], target: list[P]) -> Code:
        """Cast each leaf to its dtype, then reshard it from its spec in `source` to that in `target`. A pending sum is summed in
        the wider of both dtypes."""

        def cast(values: list[Tensor]) -> list[Tensor]:
            return [_cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]

        distinct = list(dict.fromkeys(dtypes))
        to = ",".join(str(dtype).removeprefix("torch.") for dtype in distinct)
        which = f" [{''.join(str(distinct.index(dtype)) for dtype in dtypes)}]" if len(distinct) > 1 else ""
        key = name if len(distinct) == 1 and leaves[0].dtype == dtypes[0] else f"{name} to {to}{which}"
        return self.compile(key, cast, (list(leaves),), source, target)

    def sum(
        self, left: list[int], right: list[int], dtypes: Sequence[torch.dtype], *, over: bool, highest: frozenset[int]
    ) -> Code:
        """`left + right` in `dtypes`, value by value, on each rank; pending sums stay pending.

        over: whether sums are written over `left`, which has these dtypes. highest: of which values the higher one
        counts instead.
        """

        def add(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
            pairs = [(_cast(x, dtype), y) for x, y, dtype in zip(a, b, dtypes, strict=True)]
            return [torch.maximum(x, y) if i in highest else x + y for i, (x, y) in enumerate(pairs)]

        values = self.values
        key = (over, highest, tuple(dtypes), *((values[v].shape, values[v].dtype, values[v].spec) for v in (*left, *right)))
        if key not in self.sums:
            args, specs = (values.globals(left), values.globals(right)), values.specs([*left, *right])
            name, passes = ("add to", (overwrite_operands,)) if over else ("add", ())
            self.sums[key] = self.compile(name, add, args, specs, values.specs(left), tuple(dtypes), passes)
        return self.sums[key]


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype`; a pending sum stays one if that dtype holds every value of its own exactly."""
    return widen(value, dtype) if torch.promote_types(value.dtype, dtype) == dtype else value.to(dtype)
