"""From a function to the graph of one rank: trace the function, lower it for specs on a mesh, check and simulate the result."""

from mpar.sharding import _collectives as collectives
from mpar.sharding._bucket import bucket
from mpar.sharding._check import check
from mpar.sharding._check_primitive import check_primitive
from mpar.sharding._control import CONTROL, Cond, bodies_of, copy_bodies, num_turns
from mpar.sharding._control_memory import held_inside
from mpar.sharding._cost import node_cost, workspace_of
from mpar.sharding._describe import Collective, collectives_of, describe_graph
from mpar.sharding._lower import RankGraph, ReplicatedFallback, lower
from mpar.sharding._overlap import is_heavy, overlap_posted
from mpar.sharding._pass import erase_dead_nodes, graph_pass
from mpar.sharding._ragged import mark_ragged
from mpar.sharding._rules import NodeRule, programs_of, rule_of
from mpar.sharding._simulate import simulate_graph
from mpar.sharding._trace import LogicalGraph, source_line, trace

__all__ = [
    "CONTROL",
    "Collective",
    "Cond",
    "LogicalGraph",
    "NodeRule",
    "RankGraph",
    "ReplicatedFallback",
    "bodies_of",
    "bucket",
    "check",
    "check_primitive",
    "collectives",
    "collectives_of",
    "copy_bodies",
    "describe_graph",
    "erase_dead_nodes",
    "graph_pass",
    "held_inside",
    "is_heavy",
    "lower",
    "mark_ragged",
    "node_cost",
    "num_turns",
    "overlap_posted",
    "programs_of",
    "rule_of",
    "simulate_graph",
    "source_line",
    "trace",
    "workspace_of",
]
