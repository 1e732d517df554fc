"""Declared ops: how an op of `torch.library` that is no primitive may be sharded."""

from collections.abc import Callable

from mpar.errors import ShardingError
from mpar.ops.primitive._sharding_rule import ShardingRule, parse_sharding
from mpar.torch_private import overload_of

__all__ = ["declare_sharding", "declared_rule"]

_DECLARED: dict[object, ShardingRule] = {}


def declare_sharding(op: Callable[..., object], rule: str, *, need_replication: str = "", linear: str = "") -> None:
    """State the factors of every dim of an op's tensors, such as `"... d, d -> ... d"`.

    op:     what `torch.library.custom_op` returns, or an overload such as `torch.ops.mine.scale.default`.
    rule:   an entry for each operand that is a tensor, in the order of the op's schema, and for each result. That of an operand
            which is None in a call is skipped.
    need_replication, linear: as in `Primitive.def_sharding`; `linear` holds names of the op's schema.

    When a function that calls the op is compiled, the rule is compared with what the op does: it is run on small tensors on the
    CPU, and a factor across which its results are not independent, or a linearity that is none, is refused.
    Raises ShardingError if the rule does not have these entries, or `linear` another name, or for an op of lists of tensors.
    """
    overload = overload_of(op)
    parsed = parse_sharding(rule, need_replication=need_replication, linear=linear)
    schema = overload._schema
    operands = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    problems = [f"{argument.name} is a list of tensors" for argument in schema.arguments if "List[Tensor]" in str(argument.type)]
    if len(parsed.operands) != len(operands):
        problems.append(f"{len(parsed.operands)} entries for the {len(operands)} operands {operands}")
    if len(parsed.results) != len(schema.returns):
        problems.append(f"{len(parsed.results)} entries for {len(schema.returns)} results")
    unknown = sorted(parsed.linear - set(operands))
    problems += [f"linear names {unknown}, which are not operands"] if unknown else []
    if problems:
        raise ShardingError(f"declare_sharding of {schema.name} as {rule!r}:\n  " + "\n  ".join(problems))
    _DECLARED[overload] = parsed


def declared_rule(target: object) -> ShardingRule | None:
    """The rule that `declare_sharding` was given for the target of a node; None without one."""
    return _DECLARED.get(target)
