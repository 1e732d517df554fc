"""Join: two codes that do not need each other become one, in which the messages of each travel while the other computes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from mpar.compiler.segment._code import Code, Target
from mpar.compiler.segment._make_code import finish_code
from mpar.torch_private import storage_key

__all__ = ["join_codes"]


def join_codes(first: Code, second: Code, operands: Sequence[int], target: Target) -> Code:
    """The code that does what `first` and `second` do, in an order in which messages are hidden on the hardware of the target.

    operands: for each operand of `first`, then of `second`, which operand of the joined code it is; both may read the same. For
              an operand of `second` that is a result of `first`: -1 less its number, -1 being the first result.
    Its results are those of `first`, then those of `second`.
    """
    graph = fx.Graph()
    inputs: dict[int, fx.Node] = {}
    results: list[fx.Node] = []
    constants: dict[str, Tensor] = {}
    spec_of = dict(zip(operands, (*first.in_specs, *second.in_specs), strict=True))
    specs = [spec_of[number] for number in sorted(spec_of) if number >= 0]
    for code, numbers in ((first, operands[: len(first.in_specs)]), (second, operands[len(first.in_specs) :])):
        results += _append(graph, code, numbers, inputs, constants)
        inputs |= {-1 - i: node for i, node in enumerate(results)}
    graph.output(tuple(results))
    for number in sorted((number for number in inputs if number >= 0), reverse=True):
        next(iter(graph.nodes)).prepend(inputs[number])
    joined = [*(first.joined or [first.kind.name]), *(second.joined or [second.kind.name])]
    name = " + ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(joined).items())
    code = finish_code(name, graph, constants, specs, [*first.out_specs, *second.out_specs], target)
    return replace(code, joined=tuple(joined))


def _append(
    graph: fx.Graph, code: Code, numbers: Sequence[int], inputs: dict[int, fx.Node], constants: dict[str, Tensor]
) -> list[fx.Node]:
    """Copy the ops of `code` behind those of `graph`; returns its results. `inputs` and `constants` get what they lack."""
    assert code.graph is not None, "for hardware that overlaps, code is kept as a graph"
    renewed = _Renewed()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in zip(numbers, code.graph.find_nodes(op="placeholder"), strict=True):
        if number in inputs:
            renewed.is_same(node.meta["val"], inputs[number].meta["val"])
        else:
            inputs[number] = graph.placeholder(f"operand{number}")
            inputs[number].meta = dict(node.meta) | {"val": renewed(node.meta["val"])}
        copies[node] = inputs[number]
    names = {name: _add(constants, name, constant) for name, constant in code.kind.constants.items()}
    for node in code.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta) | {"val": renewed(node.meta["val"])}
            if node.op == "get_attr":
                copies[node].target = names[node.target]
    return [copies[result] for result in code.graph.output_node().args[0]]


def _add(constants: dict[str, Tensor], name: str, constant: Tensor) -> str:
    """Add a constant; returns its name, which is another if a different constant has `name`."""
    while name in constants and constants[name] is not constant:
        name += "_"
    constants[name] = constant
    return name


class _Renewed:
    """Copies of tensors without data: those that share a storage have copies that share one."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def is_same(self, value: Tensor, other: Tensor) -> None:
        """Let copies of what shares a storage with `value` share that of `other`."""
        self._storages[storage_key(value)] = other.untyped_storage()

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self, value))
        if not isinstance(value, Tensor):
            return value
        key = storage_key(value)
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(value.untyped_storage().nbytes(), device="meta")
        empty = torch.empty(0, dtype=value.dtype, device="meta")
        return empty.set_(self._storages[key], value.storage_offset(), value.shape, value.stride())
