"""What a primitive is: an op with its meaning, and a rule for every transformation of functions that use it."""

from mpar.ops.primitive._autograd import Operand, Static
from mpar.ops.primitive._declared import declare_sharding, declared_rule
from mpar.ops.primitive._emitter import Emitter
from mpar.ops.primitive._primitive import PRIMITIVES, Cost, Primitive, primitive_of
from mpar.ops.primitive._sharding_rule import Factors, Placement, ShardingRule, parse_sharding

__all__ = [
    "PRIMITIVES",
    "Cost",
    "Emitter",
    "Factors",
    "Operand",
    "Placement",
    "Primitive",
    "ShardingRule",
    "Static",
    "declare_sharding",
    "declared_rule",
    "parse_sharding",
    "primitive_of",
]
