"""AdaptedSegment: the function of a segment whose weights have adapters. The function itself knows nothing of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpar import ops, tree
from mpar.adapters._leaves import ADAPTERS, letters_of
from mpar.adapters._low_rank import RANK, Drop, Factor, LowRank
from mpar.adapters._targets import Adapted
from mpar.errors import ConfigError
from mpar.models import DRAW, MatrixLeaf, drop
from mpar.ops import StandIn

__all__ = ["AdaptedSegment", "Place", "Use", "letters_of_use", "low_rank", "norm"]

Place = tuple[int, str]
"""Where a leaf is among the parameters of a segment: the index of a subtree, and the path in it."""


@dataclass(frozen=True)
class Use:
    """An adapter of one leaf of a segment.

    letters: of the dims of the weight, of A, of B, and of the magnitude, which is there only with DoRA. rate: of dropout, `label`
    tells several of a segment apart. gate: the key of the context with what is multiplied in the place of `scale`, None without.
    """

    weight: Place
    a: Place
    b: Place
    magnitude: Place | None
    letters: tuple[str, str, str, str]
    scale: float
    rate: float
    label: str
    gate: str | None = None

    def stand_in(
        self, weight: Tensor | StandIn, params: tuple, context: Mapping[str, Tensor] | None, drawn: Mapping[str, Tensor] | None
    ) -> LowRank:
        """What stands for the weight. `context` has the gates, `drawn` what dropout reads; None where nothing is dropped."""
        of_weight, of_a, of_b, of_gain = self.letters
        dropped: Drop | None = None
        if self.rate and drawn is not None:
            dropped = partial(drop, rate=self.rate, context=drawn, label=self.label)
        low = LowRank(weight, of_weight, Factor(_at(params, self.a), of_a), Factor(_at(params, self.b), of_b), self.scale)
        if self.magnitude is None:
            gate = None if self.gate is None or context is None else context[self.gate]
            return LowRank(weight, of_weight, low.a, low.b, self.scale, drop=dropped, gate=gate)
        magnitude = _at(params, self.magnitude)
        gain = Factor(magnitude / norm(low, of_gain).to(magnitude.dtype), of_gain)
        return LowRank(weight, of_weight, low.a, low.b, self.scale, gain, dropped)


@dataclass(frozen=True)
class AdaptedSegment:
    """`fn` with adapted weights. The first `count` of its parameters are those of `fn`, the others have the adapters.

    Its other methods, such as `token_losses` of a head, are those of `fn`, which are given the parameters first, too. What A
    reads is dropped in them if the context has what dropout reads.
    """

    fn: Callable[..., Any]
    count: int
    uses: tuple[Use, ...]

    def __call__(self, params: tuple, x: Any, context: Mapping[str, Tensor], *others: Any, training: bool) -> Any:
        """`fn` with adapted weights."""
        adapted = self.adapted(params, context, context if training else None)
        return self.fn(adapted, x, context, *others, training=training)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "fn":
            raise AttributeError(name)
        value = getattr(self.fn, name)
        return partial(self._method, value) if callable(value) else value

    def _method(self, method: Callable[..., Any], params: tuple, *args: Any, **kwargs: Any) -> Any:
        drawn = next((x for x in args if isinstance(x, Mapping) and DRAW in x), None)  # a context of training, where tokens drop
        return method(self.adapted(params, drawn, drawn), *args, **kwargs)

    def adapted(
        self, params: tuple, context: Mapping[str, Tensor] | None, drawn: Mapping[str, Tensor] | None
    ) -> tuple:
        """The parameters of `fn`, in which objects stand for the adapted weights; see `Use.stand_in`."""
        found = list(params[: self.count])
        for use in self.uses:
            index, path = use.weight
            weight = tree.get(found[index], path)
            found[index] = tree.replace(found[index], path, use.stand_in(weight, params, context, drawn))
        return tuple(found)


def norm(low: LowRank, letters: str) -> Tensor:
    """The norm of the weight for each of its outputs, whose dims have `letters`, as a constant: it has no gradient (sec. 4.3)."""
    base = low.base.tensor() if isinstance(low.base, StandIn) else low.base
    if isinstance(low.base, LowRank):
        raise ConfigError("cannot add up a DoRA adapter and another one of the same weight: make one of them active, `active=`")
    a, b = (Factor(factor.value.detach(), factor.letters) for factor in (low.a, low.b))
    plain = LowRank(base.detach(), low.letters, a, b, low.scale)
    wide = plain.tensor().to(torch.promote_types(base.dtype, torch.float32))
    return ops.einsum(f"{low.letters},{low.letters}->{letters}", wide, wide).sqrt()


def low_rank(
    weight: Tensor | StandIn, name: str, adapted: Adapted, leaf: MatrixLeaf, read: Callable[[str], Tensor], *, dora: bool
) -> LowRank:
    """What stands for a weight with the adapter `name`; `read` gives leaves of adapters by path."""
    first = adapted.matrix.leaves[0]
    expert = () if leaf.expert is None else (leaf.expert,)
    of_weight, of_a, of_b, of_gain = letters_of_use(letters_of(leaf), expert, leaf.letters("given"), leaf.letters("result"))
    a = read(f"{ADAPTERS}.{name}.{first.home}.a").to(weight.dtype)
    b = read(f"{ADAPTERS}.{name}.{leaf.home}.b").to(weight.dtype)
    low = LowRank(weight, of_weight, Factor(a, of_a), Factor(b, of_b), adapted.scale)
    if not dora:
        return low
    magnitude = read(f"{ADAPTERS}.{name}.{leaf.home}.magnitude").to(weight.dtype)
    return LowRank(weight, of_weight, low.a, low.b, adapted.scale, Factor(magnitude / norm(low, of_gain), of_gain))


def letters_of_use(
    dims: Mapping[str, str], expert: tuple[str, ...], given: tuple[str, ...], result: tuple[str, ...]
) -> tuple[str, str, str, str]:
    """The letters of weight, A, B and magnitude, where `dims` has the letter of each dim of the weight."""
    of_expert, of_given, of_result = ("".join(dims[dim] for dim in names) for names in (expert, given, result))
    return "".join(dims.values()), of_expert + of_given + RANK, of_expert + RANK + of_result, of_result


def _at(params: tuple, place: Place) -> Tensor:
    index, path = place
    return tree.get(params[index], path)
