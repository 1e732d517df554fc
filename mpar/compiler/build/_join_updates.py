"""Join updates: many tensors are updated in one call, which overwrites them."""

import operator

from torch import fx

from mpar.ops import PRIMITIVES, Primitive
from mpar.sharding import graph_pass

__all__ = ["join_updates"]

MANY: dict[Primitive, Primitive] = {PRIMITIVES[name]: PRIMITIVES[f"{name}_many"] for name in ("adamw", "sgd")}


@graph_pass
def join_updates(graph: fx.Graph) -> dict[str, int]:
    """Update many tensors in one call that overwrites them: the step gives its operands away.

    before:  %n = adamw(%p, %g, %m, %v, ...); %o = adamw(%q, %h, %k, %w, ...)
    after:   %j = adamw_many([%p, %q], [%g, %h], [%m, %k], [%v, %w], ...)
    """
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        one = next((p for p in MANY if p.op == node.target), None)
        if one is None:
            continue
        num_lists = MANY[one].operands.index("lr")  # then come the scalars
        lists, scalars = node.args[:num_lists], node.args[num_lists:]
        if all(n is not None and n.meta["val"].is_contiguous() for n in lists):
            dtype = lists[0].meta["val"].dtype
            groups.setdefault((one.name, tuple(scalars), tuple(sorted(node.kwargs.items())), dtype), []).append(node)
    for (name, scalars, kwargs, _), nodes in groups.items():
        one = next(p for p in MANY if p.name == name)
        _join_update(graph, MANY[one], nodes, scalars, dict(kwargs))
    return {"updates_joined": sum(len(nodes) for nodes in groups.values())}


def _join_update(graph: fx.Graph, many: Primitive, nodes: list[fx.Node], scalars: tuple, kwargs: dict) -> None:
    num_lists = len(nodes[0].args) - len(scalars)
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max(nodes, key=order.__getitem__)
    with graph.inserting_after(last):
        lists = ([n.args[i] for n in nodes] for i in range(num_lists))
        left_out: list[list[fx.Node]] = [[] for _ in many.operands[len(nodes[0].args) :]]  # lists that only the joined op has
        joined = graph.call_function(many.op, (*lists, *scalars, *left_out), kwargs)
    joined.meta = {
        "val": many.op(*fx.node.map_arg(joined.args, lambda n: n.meta["val"]), **kwargs),
        "spec": None,
        "line": "",
        "labels": (),
    }
    at = joined
    for result in range(len(many.results)):
        with graph.inserting_after(at):
            column = graph.call_function(operator.getitem, (joined, result))
        column.meta = {"val": joined.meta["val"][result], "spec": None, "line": "", "labels": ()}
        at = column
        for position, node in enumerate(nodes):
            old = next((user for user in node.users if user.target is operator.getitem and user.args[1] == result), None)
            if old is None:
                continue
            with graph.inserting_after(at):
                part = graph.call_function(operator.getitem, (column, position))
            part.meta = dict(old.meta) | {"val": joined.meta["val"][result][position]}
            at = part
            old.replace_all_uses_with(part)
            graph.erase_node(old)
