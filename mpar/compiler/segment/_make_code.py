"""Make code: a checked rank graph goes through the last passes and becomes a kind: Python source, with its costs and memory."""

from collections.abc import Mapping

from torch import Tensor, fx

from mpar.compiler.segment._code import Code, Target
from mpar.compiler.segment._codegen import coordinates_of, generate
from mpar.compiler.segment._fuse import fuse
from mpar.compiler.segment._hide import hide_messages
from mpar.compiler.segment._join_products import neighbours
from mpar.compiler.segment._kernels import choose_kernels
from mpar.compiler.segment._memory import measure
from mpar.compiler.segment._reuse import IN_PLACE, reuse_operands
from mpar.compiler.segment._uses import collective_use, collective_uses, op_use, stretches_of
from mpar.compiler.segment._write_state import overwritten_operands
from mpar.errors import ProgramError
from mpar.hardware import Hardware
from mpar.ir import Kind, collective_time, op_time
from mpar.mesh import Mesh
from mpar.sharding import bucket, collectives, copy_bodies, overlap_posted, workspace_of
from mpar.spec import P

__all__ = ["finish_code", "make_code"]


def make_code(
    name: str, graph: fx.Graph, constants: Mapping[str, Tensor], in_specs: list[P], out_specs: list[P], target: Target
) -> Code:
    """Make code of a checked rank graph, which the last passes change. `constants` may hold more than the graph reads."""
    for each in (*(body.graph for body in copy_bodies(graph)), graph):
        bucket(each)
        overlap_posted(each)
        fuse(each, target.kernels)
    return finish_code(name, graph, constants, in_specs, out_specs, target)


def finish_code(
    name: str, graph: fx.Graph, constants: Mapping[str, Tensor], in_specs: list[P], out_specs: list[P], target: Target
) -> Code:
    """The passes of `make_code` that need the hardware, and the code."""
    before = None
    if target.hardware is not None:
        before = _copy(graph)
        _hide(graph, target.mesh, target.hardware)
    reuse_operands(graph)
    uses = choose_kernels(graph, target.kernels)
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    in_values = tuple(node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    out_values = tuple(node.meta["val"] for node in graph.output_node().args[0])
    kind = Kind(
        name,
        generate(graph),
        {key: value for key, value in constants.items() if key in used},
        collective_uses(graph),
        stretches_of(graph),
        max(map(workspace_of, graph.nodes), default=0),
        measure(graph, workspace_of),
        len(graph.nodes),
        tuple((tuple(v.shape), v.dtype) for v in in_values),
        tuple((tuple(v.shape), v.dtype) for v in out_values),
        coordinates_of(graph),
        uses,
        measure(graph, workspace_of, all_rows_come=True) if any("ragged" in node.meta for node in graph.nodes) else None,
        overwritten_operands(graph, IN_PLACE.values()),
        neighbours(graph),
    )
    if len(out_values) != len(out_specs) or len(in_values) != len(in_specs):
        raise ProgramError(
            f"code {name!r}: {len(in_values)} operands for {len(in_specs)} specs, {len(out_values)} results for {len(out_specs)}"
        )
    return Code(kind, in_values, tuple(in_specs), out_values, tuple(out_specs), before)


def _copy(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose nodes have the same values."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, copies))
    return copy


def _hide(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> None:
    """Hide the collectives of a rank graph behind its ops, as long as both take on `hardware`."""

    def seconds(node: fx.Node) -> float:
        if node.target in collectives.COLLECTIVES:
            return collective_time(mesh, collective_use(node), hardware)
        use = op_use(node)
        return op_time(use, hardware) if use.bytes or use.flops else 0.0

    hide_messages(graph, seconds)
