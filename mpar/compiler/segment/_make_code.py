"""Make code of a checked rank graph: the last passes, the source, and what is known of it without running it."""

from collections.abc import Mapping

from torch import Tensor, fx

from mpar.compiler.segment._code import Code
from mpar.compiler.segment._codegen import generate, positions_of
from mpar.compiler.segment._fuse import fuse
from mpar.compiler.segment._kernels import choose_kernels
from mpar.compiler.segment._memory import measure
from mpar.compiler.segment._reuse import reuse_operands
from mpar.errors import ProgramError
from mpar.ir import CollectiveUse, Kind
from mpar.kernels import Kernels
from mpar.sharding import bucket, collectives, graph_cost, hidden_cost, overlap_posted, workspace_of
from mpar.spec import P

__all__ = ["make_code"]


def make_code(
    name: str, graph: fx.Graph, constants: Mapping[str, Tensor], in_specs: list[P], out_specs: list[P], kernels: Kernels
) -> Code:
    """Compile a checked rank graph, which the last passes change."""
    bucket(graph)
    overlap_posted(graph)
    fuse(graph, kernels)
    reuse_operands(graph)
    uses = choose_kernels(graph, kernels)
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    cost = graph_cost(graph)
    ins = tuple(node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    outs = tuple(node.meta["val"] for node in graph.output_node().args[0])
    kind = Kind(
        name,
        generate(graph),
        {key: value for key, value in constants.items() if key in used},
        tuple(_collective_uses(graph)),
        cost.flops,
        cost.bytes,
        cost.workspace,
        measure(graph, workspace_of),
        len(graph.nodes),
        tuple((tuple(v.shape), v.dtype) for v in ins),
        tuple((tuple(v.shape), v.dtype) for v in outs),
        positions_of(graph),
        uses,
        measure(graph, workspace_of, most=True) if any("ragged" in node.meta for node in graph.nodes) else None,
    )
    if len(outs) != len(out_specs) or len(ins) != len(in_specs):
        raise ProgramError(f"segment {name}: {len(outs)} results for {len(out_specs)} specs")
    return Code(kind, ins, tuple(in_specs), outs, tuple(out_specs))


def _hidden(node: fx.Node) -> tuple[int, int]:
    if node.target not in collectives.POSTED:
        return 0, 0
    cost = hidden_cost(node)
    return cost.flops, cost.bytes


def _collective_uses(graph: fx.Graph) -> list[CollectiveUse]:
    uses = []
    for node in graph.nodes:
        if node.target in collectives.COLLECTIVES:
            num_tensors = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
            how = node.kwargs
            nbytes, ragged = collectives.bytes_of(node), node.target is collectives.exchange_rows
            times = node.args[0][0].meta.get("ragged", 1) if node.target in collectives.POSTED else 0
            uses.append(
                CollectiveUse(
                    node.target.__name__,
                    how["axes"],
                    how["size"],
                    nbytes,
                    num_tensors,
                    node.meta.get("line", ""),
                    *_hidden(node),
                    ragged,
                    nbytes * times,
                )
            )
    return uses
