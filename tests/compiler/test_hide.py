"""Hide: what runs while a message of a segment travels, in which order, and that the result stays the same."""

import operator
import random

import pytest
import torch
from torch import fx

from mpar.compiler.segment._hide import hide_messages
from mpar.ops import PRIMITIVES
from mpar.sharding import collectives

FREE = (operator.getitem, collectives.arrived)


class Written:
    """A graph that is written op by op; `took` says how long each op takes."""

    def __init__(self):
        self.graph, self.took = fx.Graph(), {}

    def operand(self):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(4, device="meta")
        return node

    def op(self, *operands, took):
        return self._add(torch.ops.aten.add.Tensor if len(operands) == 2 else torch.ops.aten.neg.default, operands, {}, took)

    def gather(self, x, took, axes=("tp",)):
        return self._add(collectives.all_gather, (x,), {"axes": axes, "dim": 0, "size": 1}, took)

    def _add(self, target, operands, kwargs, took):
        node = self.graph.call_function(target, operands, kwargs)
        node.meta["val"], self.took[node] = torch.empty(4, device="meta"), took
        return node

    def seconds(self, node):
        return self.took.get(node, 0.0)

    def hide(self, *results):
        """The names of all ops in their new order: `gather` posted, `arrived`, and ops as o0, o1, ... in the order as written."""
        self.graph.output(results)
        ops = [node for node in self.took if node.target is not collectives.all_gather]
        hide_messages(self.graph, self.seconds)
        self.graph.lint()
        calls = [node for node in self.graph.nodes if node.op == "call_function" and node.target != operator.getitem]
        return [self._name(node, ops) for node in calls]

    def _name(self, node, ops):
        if node.target is collectives.all_gather:
            return "posted" if node.kwargs.get("posted") else "gather"
        return "arrived" if node.target is collectives.arrived else f"o{ops.index(node)}"


def test_an_op_that_needs_no_message_runs_while_one_travels():
    """Written behind the reader of the message, it runs before it; the time that it takes is saved."""
    w = Written()
    x, y = w.operand(), w.operand()
    late = w.op(w.gather(x, took=5.0), took=1.0)
    assert w.hide(late, w.op(y, took=4.0)) == ["posted", "o1", "arrived", "o0"]


def test_nothing_changes_where_nothing_is_saved():
    """One chain; work that is too short; a collective over pp, in which all positions of the pipeline meet."""
    chain = Written()
    assert chain.hide(chain.op(chain.gather(chain.op(chain.operand(), took=3.0), took=5.0), took=1.0)) == ["o0", "gather", "o1"]
    short = Written()
    x, y = short.operand(), short.operand()
    assert short.hide(short.op(short.gather(x, took=500.0), took=1.0), short.op(y, took=4.0)) == ["gather", "o0", "o1"]
    crossing = Written()
    x, y = crossing.operand(), crossing.operand()
    late = crossing.op(crossing.gather(x, took=5.0, axes=("pp", "tp")), took=1.0)
    assert crossing.hide(late, crossing.op(y, took=4.0)) == ["gather", "o0", "o1"]


def test_what_leads_to_a_message_runs_first():
    """Of two ops that are ready, the short one before the next message goes first, though it was written last."""
    w = Written()
    x, y = w.operand(), w.operand()
    first = w.op(w.gather(w.op(x, took=6.0), took=5.0), took=1.0)  # o0, o1
    second = w.op(w.gather(w.op(y, took=1.0), took=5.0), took=6.0)  # o2, o3
    assert w.hide(first, second) == ["o2", "posted", "o0", "posted", "arrived", "o3", "arrived", "o1"]


def test_an_op_that_no_message_needs_waits_for_a_gap_but_not_for_long():
    """Like a product for the gradient of a parameter: it is computed under the first message that nothing else hides."""
    w = Written()
    x = w.operand()
    dy = w.op(x, took=1.0)
    dw = w.op(dy, took=4.0)  # o1, written before the product that leads to the message
    dx = w.op(w.gather(w.op(dy, took=2.0), took=5.0), took=1.0)
    assert w.hide(dw, dx) == ["o0", "o2", "posted", "o1", "arrived", "o3"]
    busy = Written()  # always another message's work, so that there is no gap: it runs when four messages have been waited for
    kept = busy.op(busy.operand(), took=1.0)  # o0
    ends = [busy.operand(), busy.operand()]
    for _ in range(5):
        ends = [busy.op(busy.gather(end, took=1.0), took=3.0) for end in ends]
    order = busy.hide(kept, *ends)
    assert order[: order.index("o0")].count("arrived") + order[: order.index("o0")].count("gather") <= 5


def test_what_is_overwritten_is_read_before_and_after():
    """An op that writes over its operand stays between those that read the old value and those that read the new one."""
    graph = fx.Graph()
    x, q, cos = (graph.placeholder(name) for name in ("x", "q", "cos"))
    gathered = graph.call_function(collectives.all_gather, (x,), {"axes": ("tp",), "dim": 0, "size": 1})
    reader = graph.call_function(torch.ops.aten.add.Tensor, (gathered, q))
    rope = graph.call_function(PRIMITIVES["rope_many"].op, ([q], cos, cos), {"interleaved": False})
    turned = graph.call_function(operator.getitem, (rope, 0))
    value = torch.empty(4, device="meta")
    for node in (x, cos, gathered, reader):
        node.meta["val"] = torch.empty(4, device="meta")
    q.meta["val"] = turned.meta["val"] = value
    rope.meta["val"] = (value,)
    graph.output((reader, turned))
    took = {gathered: 5.0, reader: 1.0, rope: 4.0}
    hide_messages(graph, lambda node: took.get(node, 0.0))
    order = list(graph.nodes)
    assert order.index(reader) < order.index(rope)


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_keep_their_dataflow(seed):
    """Every op still reads what it read; each message is waited for before it is read; the predicted time is no longer."""
    rng, w = random.Random(seed), Written()
    nodes = [w.operand(), w.operand()]
    for _ in range(rng.randrange(5, 40)):
        operands = rng.sample(nodes, min(len(nodes), rng.choice([1, 2])))
        took = rng.choice([0.0, 0.5, 1.0, 5.0])
        nodes.append(w.gather(operands[0], took + 0.1) if rng.random() < 0.4 else w.op(*operands, took=took))
    reads = {node: list(node.all_input_nodes) for node in nodes}
    before = elapsed(list(w.graph.nodes), w.seconds)
    w.hide(*nodes[-3:])
    for node in nodes:
        assert [source(used) for used in node.all_input_nodes] == reads[node]
    assert elapsed(list(w.graph.nodes), w.seconds) <= before * (1 + 1e-9)


def source(node):
    """The collective that `node` is the result of, if it is one that was posted; else the node."""
    while node.target in FREE:
        node = node.args[0]
    return node


def elapsed(nodes, seconds):
    """The time that nodes take in this order, if messages travel one after the other."""
    now = links = 0.0
    arrival = {}
    for node in nodes:
        if node.target is collectives.all_gather:
            arrival[node] = links = max(now, links) + seconds(node)
            now = now if node.kwargs.get("posted") else links
        elif node.target is collectives.arrived:
            now = max(now, arrival[node.args[0]])
        elif node.op == "call_function":
            now += seconds(node)
    return now
