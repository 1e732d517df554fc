"""What can be wrong with the declaration of a primitive: its name, its signature, its sharding rule."""

import re
from collections.abc import Iterable

from mpar.errors import ConfigError, ShardingError
from mpar.ops.primitive._sharding_rule import ShardingRule

__all__ = ["check_name", "check_rule", "check_rule_text"]

_OPERANDS, _RESULTS = r"\w+(\?|\[\])?", r"\w+(\[\])?"
_SIGNATURE = re.compile(rf"\s*({_OPERANDS}(\s*,\s*{_OPERANDS})*)?\s*->\s*{_RESULTS}(\s*,\s*{_RESULTS})*\s*")


def check_name(name: str, signature: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless a primitive can be called `name`, and `signature` can be read."""
    if not name.isidentifier():
        raise ConfigError(f"cannot declare a primitive called {name!r}: its name must be that of a Python function")
    if name in known:
        raise ConfigError(
            f"cannot declare primitive {name!r} again: a name can be declared once in a process, and is global.\n"
            "Give it another name; in a notebook, start the process anew after changing it."
        )
    if _SIGNATURE.fullmatch(signature) is None:
        raise ConfigError(
            f"cannot declare primitive {name!r}: its signature {signature!r} is not `operand, operand -> result`.\n"
            'Write it such as "x, weight? -> y": one that may be None has a ?, a list of tensors [].'
        )


def check_rule_text(name: str, rule: str) -> None:
    """Raise ShardingError unless the text of a rule has operands and results."""
    if rule.count("->") != 1:
        raise ShardingError(f'sharding rule {rule!r} of primitive {name!r} is not operands -> results, such as "b d -> b d"')


def check_rule(name: str, rule: ShardingRule, operands: tuple[str, ...], results: tuple[str, ...]) -> None:
    """Raise ShardingError, with all problems, unless the rule has an entry for each operand and result, and only names these and
    their factors."""
    problems = [
        f"it has {len(entries)} {label}, the primitive {len(names)} ({', '.join(names)})"
        for label, entries, names in (("operands", rule.operands, operands), ("results", rule.results, results))
        if len(entries) != len(names)
    ]
    factors = {factor for dims in (*rule.operands, *rule.results) for group in dims for factor in group}
    problems += [f"need_replication has {factor!r}, which no dim has" for factor in sorted(rule.need_replication - factors)]
    problems += [f"linear has {operand!r}, which is no operand" for operand in sorted(rule.linear - set(operands))]
    if problems:
        raise ShardingError(f"the sharding rule of primitive {name!r} cannot hold:\n  " + "\n  ".join(problems))
