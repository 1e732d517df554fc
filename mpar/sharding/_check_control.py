"""Check control flow: what enters a body has the spec that the body was lowered for, and what leaves it has the spec claimed.

Carries must leave a body as they enter it, because the next turn takes them. The predicate of a choice or of a loop must be the
same on all ranks of the mesh, because ranks that disagree would enter different collectives.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from mpar.sharding._control import Cond, Scan, While
from mpar.spec import P

__all__ = ["check_flow"]

Fail = Callable[[fx.Node, str], None]


def check_flow(node: fx.Node, result_specs: list[P | None], fail: Fail) -> None:
    """Call `fail(node, why)` if the specs around the node of a flow do not fit those of its bodies, or the bodies each other."""
    flow: Any = node.kwargs["flow"]
    operands = [operand.meta["spec"] for operand in node.args[0]]
    if isinstance(flow, Cond):
        if operands[0] != P():
            fail(node, f"its predicate is {operands[0]}, so ranks may take different branches")
        expected, results = [P(), *flow.if_true.in_specs], list(flow.if_true.out_specs)
        if flow.if_true.in_specs != flow.if_false.in_specs or flow.if_true.out_specs != flow.if_false.out_specs:
            fail(node, f"its branches return {flow.if_true.out_specs} and {flow.if_false.out_specs}")
    else:
        carries = slice(0, flow.num_carries)
        expected, results = list(flow.body.in_specs), list(flow.body.out_specs)
        if expected[carries] != results[carries]:
            fail(node, f"carries enter its body as {expected[carries]} and leave it as {results[carries]}")
        if any(spec.partial for spec in expected):
            fail(node, f"pending sums enter its body, which would be added once in every turn: {expected}")
        if isinstance(flow, Scan):
            last = flow.num_carries + flow.num_xs
            expected[flow.num_carries : last] = [_behind_turns(spec) for spec in expected[flow.num_carries : last]]
            end = len(results) - flow.num_sums
            results[flow.num_carries : end] = [_behind_turns(spec) for spec in results[flow.num_carries : end]]
    if isinstance(flow, While) and (flow.test.in_specs != flow.body.in_specs or flow.test.out_specs != (P(),)):
        fail(node, f"its test takes {flow.test.in_specs} and gives {flow.test.out_specs}, so ranks may disagree when it ends")
    if operands != expected:
        fail(node, f"its operands are {operands}, its bodies take {expected}")
    if any(claim is not None and claim != spec for claim, spec in zip(result_specs, results, strict=True)):
        fail(node, f"its results are said to be {result_specs}, its bodies give {results}")


def _behind_turns(spec: P) -> P:
    """The spec of all turns of a value, whose first dim is that of the turns."""
    return P((), *spec.dims, partial=spec.partial)
