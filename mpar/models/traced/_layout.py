"""Layout: how the parameters of a traced model are cut into leaves, and the logical axes of these.

A stored matrix of 32 heads of 128 rows becomes a leaf of shape (32, 128, ...), so that heads can be sharded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mpar.chain import Axes
from mpar.models.traced._dims import Dims, Factor
from mpar.ops import PRIMITIVES
from mpar.sharding import LogicalGraph

__all__ = ["Layout", "LeafLayout", "layouts"]

attention_p, einsum_p, embedding_p, grouped_matmul_p = (
    PRIMITIVES[name].op for name in ("attention", "einsum", "embedding", "grouped_matmul")
)


@dataclass(frozen=True)
class LeafLayout:
    """A leaf: for each dim of the stored tensor the sizes of the leaf's dims there, major first, and the logical axes of all."""

    sizes: tuple[tuple[int, ...], ...]
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(size for sizes in self.sizes for size in sizes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is stored of it."""
        return tuple(torch.Size(sizes).numel() for sizes in self.sizes)

    def transform(self, joined: int | None = None) -> str:
        """As `mpar.models.hf` writes it: "(a b) c -> a b c", with a plus before the stored dim along which leaves are joined."""
        letters = iter("abcdefghijklmnop")
        dims = [[next(letters) for _ in sizes] for sizes in self.sizes]
        left = [f"({' '.join(names)})" if len(names) > 1 else names[0] for names in dims]
        left = [f"+{text}" if dim == joined else text for dim, text in enumerate(left)]
        return f"{' '.join(left)} -> {' '.join(name for names in dims for name in names)}"


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut: one leaf, or several that lie along its dim `joined`."""

    leaves: tuple[LeafLayout, ...]
    joined: int | None = None

    def cut(self, stored: Tensor) -> list[Tensor]:
        """The leaves of a stored tensor, as views of it."""
        parts = [stored]
        if self.joined is not None:
            parts = list(stored.split([leaf.stored_shape[self.joined] for leaf in self.leaves], self.joined))
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, self.leaves, strict=True)]

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths of the leaves of the parameter `name`."""
        return (name,) if len(self.leaves) == 1 else tuple(f"{name}.{i}" for i in range(len(self.leaves)))

    def join(self, leaves: Sequence[Tensor]) -> Tensor:
        """The stored tensor of these leaves."""
        parts = [x.reshape(leaf.stored_shape) for x, leaf in zip(leaves, self.leaves, strict=True)]
        return parts[0] if self.joined is None else torch.cat(parts, self.joined)

    @property
    def axes(self) -> Axes:
        """For each stored dim of the first leaf, the first logical axis that is in it; None if there is none."""
        leaf, remaining, out = self.leaves[0], list(self.leaves[0].axes), []
        for sizes in leaf.sizes:
            names = [remaining.pop(0) for _ in sizes]
            out.append(next((name for name in names if name is not None), None))
        return tuple(out)


def layouts(logical: LogicalGraph, names: Mapping[str, str], x: str, result_axes: Axes) -> dict[str, LeafLayout]:
    """The layout of each leaf that a run reads.

    names: the leaf of each placeholder that is one, by the placeholder's path. x: the path of the residual stream among the
    placeholders; "" if there is none. result_axes: of the first result.
    """
    dims, placeholders = Dims(logical), dict(zip(logical.names, logical.placeholders, strict=True))
    owned = {node: names[path] for path, node in placeholders.items() if path in names}
    for node, axes in ((placeholders.get(x), ("batch", "seq", "embed")), (logical.results[0], result_axes)):
        for factors, label in zip(dims.of(node) if node is not None else (), axes, strict=False):
            _label(factors, label)
    kv = {node for call in _calls(logical, attention_p) for operand in call.args[1:3] for node in _feeding(operand, owned)}
    for call in _calls(logical, attention_p):
        for operand in call.args[:2]:
            _label([factor for factor in dims.of(operand)[2] if not factor.whole], "heads")
    for call in _calls(logical, embedding_p):
        if "tokens" in _path(call.args[0], placeholders):
            _label(dims.of(call.args[1])[0], "vocab")
    _label_experts(dims, _calls(logical, grouped_matmul_p))
    _label_hidden(dims, owned)
    return {name: _layout(dims.of(node), is_kv=node in kv) for node, name in owned.items()}


def _path(node: fx.Node, placeholders: Mapping[str, fx.Node]) -> str:
    return next((path for path, placeholder in placeholders.items() if placeholder is node), "")


def _calls(logical: LogicalGraph, op: object) -> list[fx.Node]:
    return [node for node in logical.graph.nodes if node.target == op]


def _feeding(node: fx.Node, parameters: Mapping[fx.Node, str]) -> set[fx.Node]:
    """The parameters that `node` is made with, not farther away than the next product."""
    found, seen, todo = set(), set(), [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in parameters:
            found.add(current)
        if current.target == einsum_p:
            todo += [operand for operand in current.all_input_nodes if _is_view_of(operand, parameters)]
        elif current.op == "call_function":
            todo += current.all_input_nodes
    return found


def _is_view_of(node: fx.Node, parameters: Mapping[fx.Node, str]) -> bool:
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node in parameters


def _label(factors: Iterable[Factor], label: str | None) -> None:
    for factor in factors:
        found = factor.found()
        found.label = found.label or label


def _label_experts(dims: Dims, products: Sequence[fx.Node]) -> None:
    """Matrices of experts are (experts, summed, given): what is not embed among the last two is the hidden size of an expert."""
    weights = [dims.of(call.args[1]) for call in products]
    for names in ({"embed": "expert_mlp"}, {"expert_mlp": "embed"}):
        for expert, summed, given in weights:
            _label(expert, "expert")
            for label in {label for label in (factor.found().label for factor in summed) if label in names}:
                _label([factor for factor in given if not factor.whole], names[label])


def _label_hidden(dims: Dims, owned: Mapping[fx.Node, str]) -> None:
    """Factors without a label that several parameters share, and that no op needs whole, are hidden features."""
    seen: dict[Factor, set[str]] = {}
    for node, name in owned.items():
        for factor in (factor for factors in dims.of(node) for factor in factors):
            seen.setdefault(factor.found(), set()).add(name)
    for factor, names in seen.items():
        if len(names) > 1 and not factor.whole and factor.size > 1:
            _label([factor], "mlp")


def _layout(dims: Sequence[Sequence[Factor]], *, is_kv: bool) -> LeafLayout:
    """A leaf whose dims are runs of factors with one label."""
    sizes: list[tuple[int, ...]] = []
    axes: list[str | None] = []
    for factors in dims:
        runs: list[tuple[str | None, int]] = []
        for factor in factors:
            label = factor.found().label
            label = None if factor.whole and label not in ("embed", "vocab") else label
            if runs and runs[-1][0] == label:
                runs[-1] = (label, runs[-1][1] * factor.size)
            elif factor.size > 1 or not runs:
                runs.append((label, factor.size))
        used: list[str | None] = []
        for label, _ in runs:
            name = "kv_heads" if label == "heads" and is_kv else label
            used.append(None if name in (*axes, *used) else name)
        sizes.append(tuple(size for _, size in runs))
        axes += used
    return LeafLayout(tuple(sizes), tuple(axes))
