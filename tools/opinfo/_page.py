"""The page about operators: what its lists hold, written from the table of rules and from traces of torch's samples."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import fx

from mpar.errors import MparError
from mpar.sharding import trace
from mpar.sharding._pass_through import Across, Pattern
from mpar.sharding._rules import RULES, has_rule, tensor_operands
from tools.opinfo._samples import ENTRIES, NOT_SAMPLED, calls_of

__all__ = ["PAGE", "lists_of_page", "reason_of", "rules_table", "without_rule", "write_page"]

PAGE = Path(__file__).parents[2] / "docs" / "torch_ops.md"
WHOLE = "computed whole"
REASONS = {
    "draws random numbers": "draws from torch's generator",
    "shape depends on data": "shape that depends on data",
    "value depends on data": "makes a Python value or a shape from the data",
    "reads memory by strides": "reads memory by strides",
    "writes into an argument": "writes into",
    "reads data": " fails.",
}
"""For each reason to refuse an operator, the words of the error that tell it."""


def reason_of(error: MparError) -> str:
    """Why an operator is refused. Raises LookupError for an error that gives none of the known reasons."""
    found = [reason for reason, words in REASONS.items() if words in str(error)]
    if not found:
        raise LookupError(f"refused for a reason of which the page does not know: {error}")
    return found[0]


def without_rule(node: fx.Node) -> bool:
    """Whether a node of a logical graph is computed whole because its op has no rule."""
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and not has_rule(node) and bool(tensor_operands(node))


@cache
def lists_of_page() -> dict[str, frozenset[str]]:
    """The lists of the page, by their marks: the ops that are computed whole, and the entries refused for each reason."""
    found = re.findall(r"<!-- (.*?) -->\n(.*)\n", PAGE.read_text(encoding="utf-8"))
    return {mark: frozenset(name.strip("`") for name in line.split(", ")) for mark, line in found if mark in (WHOLE, *REASONS)}


def rules_table() -> str:
    """The ops that pass dims through, one row for each rule."""
    rows: dict[str, list[str]] = {}
    for op, rule in RULES.items():
        rows.setdefault(_words(rule), []).append(str(op).removeprefix("aten.").removesuffix(".default"))
    lines = [f"| {words} | {', '.join(f'`{name}`' for name in sorted(names))} |" for words, names in rows.items() if words]
    return "\n".join(["| rule | ops |", "| --- | --- |", *sorted(lines)])


def _words(rule: object) -> str:
    if isinstance(rule, Pattern):
        return f"`{rule.dims}`"
    if isinstance(rule, Across):
        if isinstance(rule.dims, int):
            return "across the last dim" if rule.dims == 1 else f"across the last {rule.dims} dims"
        return "across the dims that " + " and ".join(f"`{name}`" for name in rule.dims.split()) + " give"
    return _first_words(rule)


def _first_words(rule: object) -> str:
    text = (inspect.getdoc(rule) or "").split(".")[0].split(":")[0]
    return text.removeprefix("The rule of ").replace("\n", " ")


def write_page(samples: int) -> None:
    """Write the generated lists into the page."""
    lists: dict[str, set[str]] = {mark: set() for mark in (WHOLE, *REASONS)}
    for name in ENTRIES:
        for sample in calls_of(ENTRIES[name], samples):
            try:
                lists[WHOLE] |= {str(node.target) for node in trace(sample.fn, sample.tensors).graph.nodes if without_rule(node)}
            except MparError as error:
                lists[reason_of(error)].add(name)
    text = PAGE.read_text(encoding="utf-8")
    for mark, names in lists.items():
        line = ", ".join(f"`{name}`" for name in sorted(names))
        text = re.sub(rf"(<!-- {mark} -->\n).*\n", lambda m, line=line: f"{m[1]}{line}\n", text)
    text = re.sub(r"(<!-- rules -->\n).*?(?=\n\n)", lambda m: m[1] + rules_table(), text, flags=re.S)
    text = re.sub(r"(<!-- not sampled -->\n).*?(?=\n\n)", lambda m: m[1] + "\n".join(_not_sampled()), text, flags=re.S)
    PAGE.write_text(text, encoding="utf-8")


def _not_sampled() -> Iterator[str]:
    yield "| entry | why |\n| --- | --- |"
    for name, why in NOT_SAMPLED.items():
        yield f"| `{name}` | {why} |"
