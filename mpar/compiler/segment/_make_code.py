"""Make code: a checked rank graph goes through the last passes and becomes a kind: Python source, with its costs and memory."""

from collections.abc import Mapping

from torch import Tensor, fx

from mpar.compiler.segment._code import Code
from mpar.compiler.segment._codegen import coordinates_of, generate
from mpar.compiler.segment._fuse import fuse
from mpar.compiler.segment._kernels import choose_kernels
from mpar.compiler.segment._memory import measure
from mpar.compiler.segment._op_uses import count_ops
from mpar.compiler.segment._reuse import reuse_operands
from mpar.errors import ProgramError
from mpar.ir import CollectiveUse, Kind
from mpar.kernels import Kernels
from mpar.sharding import bucket, collectives, nodes_under, overlap_posted, workspace_of
from mpar.spec import P

__all__ = ["make_code"]


def make_code(
    name: str, graph: fx.Graph, constants: Mapping[str, Tensor], in_specs: list[P], out_specs: list[P], kernels: Kernels
) -> Code:
    """Make code of a checked rank graph, which the last passes change. `constants` may hold more than the graph reads."""
    bucket(graph)
    overlap_posted(graph)
    fuse(graph, kernels)
    reuse_operands(graph)
    uses = choose_kernels(graph, kernels)
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    in_values = tuple(node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    out_values = tuple(node.meta["val"] for node in graph.output_node().args[0])
    kind = Kind(
        name,
        generate(graph),
        {key: value for key, value in constants.items() if key in used},
        tuple(_collective_uses(graph)),
        count_ops(graph.nodes),
        max(map(workspace_of, graph.nodes), default=0),
        measure(graph, workspace_of),
        len(graph.nodes),
        tuple((tuple(v.shape), v.dtype) for v in in_values),
        tuple((tuple(v.shape), v.dtype) for v in out_values),
        coordinates_of(graph),
        uses,
        measure(graph, workspace_of, all_rows_come=True) if any("ragged" in node.meta for node in graph.nodes) else None,
    )
    if len(out_values) != len(out_specs) or len(in_values) != len(in_specs):
        raise ProgramError(
            f"code {name!r}: {len(in_values)} operands for {len(in_specs)} specs, {len(out_values)} results for {len(out_specs)}"
        )
    return Code(kind, in_values, tuple(in_specs), out_values, tuple(out_specs))


def _collective_uses(graph: fx.Graph) -> list[CollectiveUse]:
    """A description of every collective in the graph, in order."""
    uses = []
    for node in graph.nodes:
        if node.target in collectives.COLLECTIVES:
            num_tensors = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
            kwargs = node.kwargs
            nbytes, ragged = collectives.bytes_of(node), node.target is collectives.exchange_rows
            ragged_factor = node.args[0][0].meta.get("ragged", 1) if node.target in collectives.POSTED else 0
            uses.append(
                CollectiveUse(
                    node.target.__name__,
                    kwargs["axes"],
                    kwargs["size"],
                    nbytes,
                    num_tensors,
                    node.meta.get("line", ""),
                    count_ops(nodes_under(node)) if node.target in collectives.POSTED else (),
                    ragged,
                    nbytes * ragged_factor,
                )
            )
    return uses
