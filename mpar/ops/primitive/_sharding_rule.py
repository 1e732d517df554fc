"""The sharding rule of an op: the factors of each dim of its operands and results, and how these factors may be sharded."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Factors", "Placement", "ShardingRule", "parse_sharding"]

Factors = tuple[tuple[str, ...], ...]
"""For each dim of a tensor its factors, major first; `("...",)` stands for any number of leading dims."""


@dataclass(frozen=True)
class ShardingRule:
    """The factors of each dim of operands and results; `...` stands for any number of leading dims, "(k g)" for a merged dim.

    A factor that no result has is summed over, so that sharding it leaves a pending sum.

    need_replication: factors that must not be sharded; operands are gathered along them.
    linear:  the operands in each of which alone the op is linear, so that a pending sum of one may stay pending.
    follows: maps a factor to its leader, another factor: it is sharded only over axes that shard its leader, and only where its
             operands already are. Keys follow queries, experts follow rows.
    as_is:   operands that are never moved: their values are about the rank that holds them.
    ragged:  maps a factor to the operand whose placement says which axes may shard the factor.
    leads:   operands whose placement decides, before that of others, which axes shard their factors. Of the others, the largest
             decides first.
    sizes:   the sizes of factors that are in merged dims only, such as both of `(g b)`.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    need_replication: frozenset[str]
    linear: frozenset[str]
    follows: tuple[tuple[str, str], ...] = ()
    as_is: frozenset[str] = frozenset()
    ragged: tuple[tuple[str, str], ...] = ()
    leads: frozenset[str] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()


@dataclass
class Placement:
    """How a primitive is computed on a mesh: its sharding rule, and local programs for cases that a rule cannot express.

    rule:             the rule, or a function from the static parameters to the rule.
    sharded:          for a factor, the local program if it is sharded; in the order in which they were defined.
    lowered:          the local program for all cases, of an op that stands for several others.
    may_grow_pending: whether a pending sum may stay pending even if the result has more bytes than the operand.
    """

    rule: ShardingRule | Callable[..., ShardingRule] | None = None
    sharded: dict[str, Callable] = field(default_factory=dict)
    lowered: Callable | None = None
    may_grow_pending: bool = False


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
    """The rule that is written as `"b s d, d f -> b s f"`, with one entry per operand and result; `_` is a dim without factors.

    In the other arguments, entries are separated by blanks; those of `follows`, `ragged` and `sizes` are pairs such as `"m:s"`.
    """
    operands, results = (tuple(_parse_dims(part) for part in side.split(",")) for side in rule.split("->"))
    return ShardingRule(
        operands,
        results,
        need_replication=frozenset(need_replication.split()),
        linear=frozenset(linear.split()),
        follows=_pairs(follows),
        as_is=frozenset(as_is.split()),
        ragged=_pairs(ragged),
        leads=frozenset(leads.split()),
        sizes=tuple((name, int(size)) for name, size in _pairs(sizes)),
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, _, right in (word.partition(":") for word in text.split()))


def _parse_dims(part: str) -> Factors:
    """`"b s (k g) h"` -> `(("b",), ("s",), ("k", "g"), ("h",))`; `"..."` stays one entry until the number of dims is known."""
    dims = re.findall(r"\(([^)]*)\)|(\S+)", part)
    return tuple(tuple(group.split()) if group else () if name == "_" else (name,) for group, name in dims)
