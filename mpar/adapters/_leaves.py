"""The leaves of an adapter: for each adapted leaf of the model A, B and the magnitude; their paths, shapes and logical axes.

The leaves of one stored matrix (fused projections) share one A, as the adapter of the stored matrix has one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpar import tree
from mpar.adapters._low_rank import RANK
from mpar.adapters._targets import Adapted
from mpar.chain import Axes
from mpar.models import MatrixLeaf

__all__ = ["ADAPTERS", "AdapterLeaf", "adapter_leaves", "nested"]

ADAPTERS = "adapters"
"""The entry of the tree of parameters that has all adapters, by their names."""


@dataclass(frozen=True)
class AdapterLeaf:
    """A leaf of an adapter.

    path:    in the tree of parameters. part: a | b | magnitude.
    letters: a letter for each dim, those of the dims of the adapted leaf, and RANK.
    text:    as `mpar.models.hf` writes it: how it is stored by PEFT.
    """

    path: str
    part: str
    letters: str
    shape: tuple[int, ...]
    axes: Axes
    text: str
    adapted: Adapted
    leaf: MatrixLeaf


def letters_of(leaf: MatrixLeaf) -> dict[str, str]:
    """The letter of each dim of an adapted leaf."""
    return dict(zip(leaf.dims, "abcdefgh", strict=False))


def adapter_leaves(
    name: str, adapted: Adapted, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes], *, dora: bool
) -> Iterator[AdapterLeaf]:
    """The leaves of the adapter `name` of one matrix. shapes, axes: of the model's leaves by path."""
    for index, leaf in enumerate(adapted.matrix.leaves):
        root = f"{ADAPTERS}.{name}.{leaf.home}"
        sizes, logical = dict(zip(leaf.dims, shapes[leaf.path], strict=True)), dict(zip(leaf.dims, axes[leaf.path], strict=True))
        letter = letters_of(leaf) | {"rank": RANK}
        sizes["rank"], logical["rank"] = adapted.rank, None
        expert = () if leaf.expert is None else (leaf.expert,)
        given, result = leaf.letters("given"), leaf.letters("result")
        words = " ".join
        if adapted.matrix.kind == "embedding" or leaf.expert is None:
            a_text, b_text = f"rank {leaf.given}", f"{leaf.result} rank"
        else:  # PEFT's layout of the experts of a layer: rows of A by expert, columns of B by rank
            a_text, b_text = f"({leaf.expert} rank) {leaf.given}", f"{leaf.result} (rank {leaf.expert})"
        parts = [("a", (*expert, *given, "rank"), a_text), ("b", (*expert, "rank", *result), b_text)]
        if dora:
            parts.append(("magnitude", result, leaf.result))
        for part, dims, text in parts:
            if part == "a" and index > 0:
                continue
            yield AdapterLeaf(
                f"{root}.{part}",
                part,
                "".join(letter[dim] for dim in dims),
                tuple(sizes[dim] for dim in dims),
                tuple(logical[dim] for dim in dims),
                f"{text} -> {words(dims)}",
                adapted,
                leaf,
            )


def nested(items: Mapping[str, object]) -> tree.Tree:
    """The tree of dicts with these values at these paths."""
    root: dict = {}
    for path, value in items.items():
        *keys, last = path.split(".")
        node = root
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return root
