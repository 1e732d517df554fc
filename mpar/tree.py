"""Pytrees: parameters, optimizer state and batches are nested tuples, dicts and frozen dataclasses with tensors at the leaves.

A leaf's *path* is a string such as `layers.3.q_DNH`: it names the leaf in checkpoints, errors and random keys. A dataclass may be
generic in `Leaf`, to say what stands at its leaves: `Head[Tensor]` holds parameters, `Head[Axes]` the logical axes of each.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

from mpar.torch_private import pytree

__all__ = ["Leaf", "flatten", "get", "leaves", "leaves_with_path", "map_leaves", "paths", "replace", "struct", "unflatten"]

T = TypeVar("T")
Leaf = TypeVar("Leaf")
"""What stands at the leaves of a struct: tensors, their sizes, their axes."""
IsLeaf = Callable[[Any], bool]


@dataclass_transform(frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and register it as a pytree whose children are its fields, in order.

    A field whose value is None is an empty subtree, so optional parameters (a bias) need no special case.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    pytree.register_dataclass(cls)
    return cls


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """`(leaves, structure)` of `tree`; `unflatten(structure, leaves)` is its inverse."""
    return pytree.tree_flatten(tree, is_leaf=is_leaf)


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """The tree with this structure and these leaves."""
    return pytree.tree_unflatten(list(leaves), structure)


def leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of `tree` in order."""
    return pytree.tree_leaves(tree, is_leaf=is_leaf)


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Apply `fn` leaf by leaf to `tree` and to `rest`, which have the same structure."""
    return pytree.tree_map(fn, tree, *rest, is_leaf=is_leaf)


def leaves_with_path(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """`(path, leaf)` for every leaf, in order; a path joins field names, keys and indices with dots."""
    pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(".".join(_key_name(key) for key in path), leaf) for path, leaf in pairs]


def paths(tree: Any, is_leaf: IsLeaf | None = None) -> list[str]:
    """The path of every leaf, in order."""
    return [path for path, _ in leaves_with_path(tree, is_leaf)]


def get(tree: Any, path: str) -> Any:
    """The subtree at `path`; the empty path is the tree itself."""
    for key in path.split(".") if path else ():
        tree = tree[_own_key(tree, key)] if isinstance(tree, (dict, list, tuple)) else getattr(tree, key)
    return tree


def replace(tree: Any, path: str, value: Any) -> Any:
    """A copy of `tree` with the subtree at `path` replaced by `value`."""
    if not path:
        return value
    key, _, rest = path.partition(".")
    new = replace(get(tree, key), rest, value)
    if isinstance(tree, dict):
        return {**tree, _own_key(tree, key): new}
    if isinstance(tree, (list, tuple)):
        index = int(key)
        return type(tree)([*tree[:index], new, *tree[index + 1 :]])
    return dataclasses.replace(tree, **{key: new})


def _own_key(tree: Any, key: str) -> Any:
    return key if isinstance(tree, dict) else int(key)


def _key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"pytree key {key!r} has no name")
