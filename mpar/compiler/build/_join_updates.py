"""Join updates: one call updates many tensors and writes the results over them."""

import operator

import torch
from torch import fx

from mpar.ops import PRIMITIVES, Primitive
from mpar.sharding import graph_pass

__all__ = ["join_updates"]

MANY: dict[Primitive, Primitive] = {PRIMITIVES[name]: PRIMITIVES[f"{name}_many"] for name in ("adamw", "sgd")}


@graph_pass
def join_updates(graph: fx.Graph) -> dict[str, int]:
    """Replace updates with the same scalars and dtype by one call, which writes over its operands.

    That is allowed because nothing reads the old parameters and slots after the update. If all results of an update are chosen
    by one condition between the old values and the new ones, the update itself keeps the old ones.

    before:  %n = adamw(%p, %g, %m, %v, ..., None); %o = adamw(%q, %h, %k, %w, ..., None)
             %n0 = where(%skip, %p, %n[0]); %n1 = where(%skip, %m, %n[1]); %n2 = where(%skip, %v, %n[2]); the same of %o
    after:   %j = adamw_many([%p, %q], [%g, %h], [%m, %k], [%v, %w], ..., %skip)
    """
    for node in [n for n in graph.nodes if _single_update(n) is not None]:
        _absorb_choice(graph, node)
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        single = _single_update(node)
        if single is None:
            continue
        num_tensors = MANY[single].operands.index("lr")  # the scalars follow them
        tensors, scalars = node.args[:num_tensors], node.args[num_tensors:]
        if all(n is not None and n.meta["val"].is_contiguous() for n in tensors):
            dtype = tensors[0].meta["val"].dtype
            groups.setdefault((single.name, tuple(scalars), tuple(sorted(node.kwargs.items())), dtype), []).append(node)
    for (name, scalars, kwargs, _), nodes in groups.items():
        single = next(p for p in MANY if p.name == name)
        _join_update(graph, MANY[single], nodes, scalars, dict(kwargs))
    return {"updates_joined": sum(len(nodes) for nodes in groups.values())}


def _single_update(node: fx.Node) -> Primitive | None:
    """The primitive of an update that can be joined with others; None for other nodes."""
    return next((p for p in MANY if p.op == node.target), None)


def _absorb_choice(graph: fx.Graph, node: fx.Node) -> None:
    """If `where(skip, old, new)` is all that reads each result `new` of an update, make `skip` an operand of the update."""
    single = _single_update(node)
    assert single is not None
    choices: list[tuple[fx.Node, fx.Node]] = []  # a result, and what chooses between it and the old value
    for item in node.users:
        (choice,) = item.users if len(item.users) == 1 else (None,)
        old = node.args[single.operands.index(single.results[item.args[1]].removeprefix("new_"))]
        if choice is None or choice.target is not torch.ops.aten.where.self or choice.args[1:] != (old, item):
            return
        choices.append((item, choice))
    conditions = {choice.args[0] for _, choice in choices}
    if len(choices) != len(single.results) or len(conditions) != 1:
        return
    (skip,) = conditions
    node.update_arg(single.operands.index("skip"), skip)
    for item, choice in choices:
        item.meta = dict(choice.meta)
        choice.replace_all_uses_with(item)
        graph.erase_node(choice)


def _join_update(graph: fx.Graph, many: Primitive, nodes: list[fx.Node], scalars: tuple, kwargs: dict) -> None:
    """Replace `nodes` by one call of `many`, behind the last of them. Its results are lists with an entry for each node."""
    num_lists = len(nodes[0].args) - len(scalars)
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max(nodes, key=order.__getitem__)
    with graph.inserting_after(last):
        lists = ([n.args[i] for n in nodes] for i in range(num_lists))
        empty_lists: list[list[fx.Node]] = [[] for _ in many.operands[len(nodes[0].args) :]]  # lists that only the joined op has
        joined = graph.call_function(many.op, (*lists, *scalars, *empty_lists), kwargs)
    joined.meta = {
        "val": many.op(*fx.node.map_arg(joined.args, lambda n: n.meta["val"]), **kwargs),
        "spec": None,
        "line": "",
        "labels": (),
    }
    anchor = joined
    for result in range(len(many.results)):
        with graph.inserting_after(anchor):
            result_list = graph.call_function(operator.getitem, (joined, result))
        result_list.meta = {"val": joined.meta["val"][result], "spec": None, "line": "", "labels": ()}
        anchor = result_list
        for entry, node in enumerate(nodes):
            old = next((user for user in node.users if user.target is operator.getitem and user.args[1] == result), None)
            if old is None:
                continue
            with graph.inserting_after(anchor):
                part = graph.call_function(operator.getitem, (result_list, entry))
            part.meta = dict(old.meta) | {"val": joined.meta["val"][result][entry]}
            anchor = part
            old.replace_all_uses_with(part)
            graph.erase_node(old)
