"""Code generation: a rank graph becomes Python source, which a rank runs without the compiler.

The code takes its operands out of a list, empties the list, and deletes every name after its last use. Memory is thus freed
exactly when the forecast says so.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from mpar.ops import primitive_of
from mpar.sharding import CONTROL, bodies_of, collectives

__all__ = ["coordinates_of", "generate"]


def generate(graph: fx.Graph) -> str:
    """The source of `run(args, comm)` for a rank graph. `mpar/runtime/_load.py` defines the global names that the code uses."""
    source = _Source()
    _define("run", graph, source)
    header = [f"{name} = {function}" for function, name in source.functions.items()]
    return "\n".join([*header, *(line for lines in source.defined for line in ["", *lines])]) + "\n"


@dataclass
class _Source:
    """Source as it is written.

    functions: expression of a function -> the global name it gets when the code is loaded.
    defined:   the lines of each function, those of bodies of control flow before those that call them.
    """

    functions: dict[str, str] = field(default_factory=dict)
    defined: list[list[str]] = field(default_factory=list)


def _define(name: str, graph: fx.Graph, source: _Source) -> None:
    """Define a function for a graph, after those for the bodies of control flow in it."""
    last_use = _last_uses(graph)
    names = {node: f"v{index}" for index, node in enumerate(graph.nodes) if node.op != "output"}
    inputs = graph.find_nodes(op="placeholder")
    lines = [f"def {name}(args, comm):"]
    if inputs:
        lines.append(f"    {', '.join(names[node] for node in inputs)}, = args")
    lines.append("    args.clear()")
    unused = [names[node] for node in inputs if not node.users]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return ({''.join(names[result] + ', ' for result in node.args[0])})")
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = CONSTANTS[{node.target!r}]")
        elif node.op == "call_function":
            dead = [names[used] for used in last_use.get(node, ())]
            if not node.users:
                dead.append(names[node])
            if node.target in CONTROL.values():
                lines.append(_flow_line(node, names, dead, name, source))
                continue
            lines.append(
                f"    {names[node]} = {_expression(node, names, source.functions)}" + (f"; del {', '.join(dead)}" if dead else "")
            )
    source.defined.append(lines)


def _flow_line(node: fx.Node, names: dict[fx.Node, str], dead: list[str], within: str, source: _Source) -> str:
    """The line that runs control flow, whose bodies are defined as functions."""
    flow = node.kwargs["flow"]
    bodies = {key: f"{within}_{names[node]}_{key}" for key in flow.bodies}
    for key, body in flow.bodies.items():
        _define(bodies[key], body.graph, source)
    calls = ", ".join(f"{key}=lambda args: {body}(args, comm)" for key, body in bodies.items())
    params = "".join(f", {key}={value}" for key, value in flow.params.items())
    operands = "".join(f"{names[operand]}, " for operand in node.args[0])
    ended = f"; del {', '.join(dead)}" if dead else ""
    return f"    {names[node]} = CONTROL[{node.target.__name__!r}](({operands}), {calls}{params}){ended}"


def coordinates_of(graph: fx.Graph) -> tuple[tuple[str, ...], ...]:
    """Every tuple of mesh axes for which the code of `graph` asks for its rank's coordinate, sorted."""
    graphs = [graph, *(body.graph for body in bodies_of(graph))]
    asking = (node for g in graphs for node in g.nodes if node.target in (collectives.shard, collectives.start))
    return tuple(sorted({node.kwargs["axes"] for node in asking}))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that it is the last to read. Values that the graph returns are in no list."""
    seen: set[fx.Node] = set()
    last_read_by: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                if node.op != "output":
                    last_read_by.setdefault(node, []).append(used)
    return last_read_by


def _expression(node: fx.Node, names: dict[fx.Node, str], functions: dict[str, str]) -> str:
    """The Python expression that computes `node`. A function that is not in `functions` yet gets a name there."""

    def text(x: object) -> str:
        if isinstance(x, fx.Node):
            return names[x]
        if isinstance(x, (list, tuple)):
            inner = ", ".join(text(item) for item in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
        if isinstance(x, torch.device):
            return "DEVICE"
        return repr(x)

    def call(fn: str, args: Iterable[object], kwargs: dict[str, object]) -> str:
        return f"{fn}({', '.join([*(text(a) for a in args), *(f'{k}={text(v)}' for k, v in kwargs.items())])})"

    if node.target is operator.getitem:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    if node.target is collectives.start:
        return f"comm.index({node.kwargs['axes']!r}) * {node.kwargs['extent']}"
    if node.target is collectives.shard:
        length = node.meta["val"].shape[node.kwargs["dim"]]
        return f"{names[node.args[0]]}.narrow({node.kwargs['dim']}, comm.index({node.kwargs['axes']!r}) * {length}, {length})"
    if node.target in (*collectives.COLLECTIVES, collectives.arrived):
        return call(f"comm.{node.target.__name__}", node.args, dict(node.kwargs))
    primitive = primitive_of(node.target)
    if primitive is None:
        function = f"torch.ops.{node.target}"
    elif "implementation" in node.meta:
        function = f"KERNELS[{primitive.name!r}, {node.meta['implementation']!r}]"
    else:
        function = f"PRIMITIVES[{primitive.name!r}]"
    return call(functions.setdefault(function, f"f{len(functions)}"), node.args, dict(node.kwargs))
