"""The compiler's first half: trace a function, place its values, lower it to one rank's graph, prove and simulate it."""

from mpar.sharding import _collectives as collectives
from mpar.sharding._check import check
from mpar.sharding._describe import Collective, collectives_of, describe_graph
from mpar.sharding._lower import RankGraph, ReplicatedFallback, lower
from mpar.sharding._simulate import simulate_graph
from mpar.sharding._trace import LogicalGraph, source_line, trace

__all__ = [
    "Collective",
    "LogicalGraph",
    "RankGraph",
    "ReplicatedFallback",
    "check",
    "collectives",
    "collectives_of",
    "describe_graph",
    "lower",
    "simulate_graph",
    "source_line",
    "trace",
]
