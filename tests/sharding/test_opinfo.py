"""Torch's own samples of its operators, forward and gradient, sharded along each dim: the numbers are those of plain torch."""

import logging

import pytest
from torch import fx

from mpar.errors import MparError
from mpar.ops import primitive_of
from mpar.sharding import trace
from mpar.sharding._probe import probed_rule
from mpar.sharding._rules import has_rule, programs_of, rule_of
from tools.opinfo import ENTRIES, PAGE, calls_of, lists_of_page, placements, reason_of, rules_table, run_case, without_rule

SAMPLES, CASES = 2, 3
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # samples use what torch deprecates
    pytest.mark.cases(40),
]


@pytest.fixture(autouse=True)
def quiet():
    """Torch logs what it does not find in its samples."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", ENTRIES)
def test_entry(name):
    """Every sample with every placement is exact, or refused for a reason that the page names; every rule is true of numbers."""
    for sample in calls_of(ENTRIES[name], SAMPLES):
        expected = sample.fn(*(x.clone() for x in sample.tensors))
        try:
            logical = trace(sample.fn, sample.tensors)
        except MparError as error:
            assert name in lists_of_page()[reason_of(error)]
            continue
        assert {str(node.target) for node in logical.graph.nodes if without_rule(node)} <= lists_of_page()["computed whole"]
        for node in logical.graph.nodes:
            assert claims(node) == [], sample.label
        for mesh, specs in placements(sample.tensors, CASES):
            run_case(logical, sample.tensors, expected, mesh, specs)


def claims(node: fx.Node) -> list[str]:
    """What the table says of a node, and the op does not do when it runs on random numbers."""
    if node.op != "call_function" or primitive_of(node.target) is not None or not has_rule(node):
        return []
    claimed, true = rule_of(node), probed_rule(node)
    names = claimed.shardable - programs_of(node).keys()
    missing = sorted(names - true.shardable) + sorted(f"linear in {i}" for i in claimed.linear - true.linear)
    return [f"{node.format_node()}: {name}" for name in missing]


def test_the_page_has_the_rules():
    """The table on the page is that of the rules."""
    assert rules_table() in PAGE.read_text(encoding="utf-8")
