"""The sharding rule of an op: the factors that make each dim of its operands and results, and how they may be sharded."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Factors", "Placement", "ShardingRule", "parse_sharding"]

Factors = tuple[tuple[str, ...], ...]
"""Per dim of a tensor the factors that make it, major first; `("...",)` stands for any number of leading dims."""


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
    """How a primitive is placed on a mesh: its rule, and the local programs of what a rule cannot say.

    rule:             the factors, or a function from the static parameters to them.
    sharded:          per factor the local program when it is sharded, in the order in which they were defined.
    lowered:          the local program always, for an op that is a name for several.
    may_grow_pending: a pending sum passes even though the result has more bytes.
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
    """The rule written as `"b s d, d f -> b s f"`, one entry per operand and result; `_` is a dim without factors.

    Words are separated by blanks; `follows`, `ragged` and `sizes` are written as `"m:s"`.
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
    """`"b s (k g) h"` -> `(("b",), ("s",), ("k", "g"), ("h",))`; `"..."` stays a dim of its own until the rank is known."""
    found = re.findall(r"\(([^)]*)\)|(\S+)", part)
    return tuple(tuple(group.split()) if group else () if name == "_" else (name,) for group, name in found)
