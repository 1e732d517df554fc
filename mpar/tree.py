"""Pytrees: parameters, optimizer state and batches are nested tuples, dicts and frozen dataclasses with tensors at the leaves.

A leaf's *path* is a string such as `layers.3.q_DNH`: it names the leaf in checkpoints, errors and random keys.

Types: the classes of trees belong to the models, and the same class may have tensors, specs or logical axes at its leaves, so the
functions here take any `Tree`. Leaves are tensors unless the caller passes `is_leaf`, whose type says what they are. A dataclass
may be generic in `Leaf`, to say what is at its leaves: `Head[Tensor]` holds parameters, `Head[Axes]` the logical axes of each.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, cast, dataclass_transform, overload

from torch import Tensor

from mpar.torch_private import pytree

__all__ = [
    "Leaf",
    "Structure",
    "Tree",
    "children",
    "flatten",
    "flatten_present",
    "get",
    "leaves",
    "leaves_with_path",
    "map_leaves",
    "paths",
    "replace",
    "struct",
    "unflatten",
]

Tree: TypeAlias = object
"""Nested tuples, lists, dicts and structs, or a single leaf; None is a tree without leaves."""
T = TypeVar("T")
"""The class of a tree, in functions that return a tree of the class that they were given."""
Leaf = TypeVar("Leaf")
"""What is at the leaves of a struct: tensors, their sizes, their axes; or the type for which `is_leaf` is true."""


@dataclass(frozen=True)
class Structure(Generic[T]):
    """A tree of class `T` without its leaves: `flatten` returns it beside the leaves, and `unflatten` needs it.

    absent: the places, among the leaves, of those that are None and that `flatten_present` did not return.
    """

    spec: pytree.TreeSpec
    absent: tuple[int, ...] = ()


@dataclass_transform(frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and register it as a pytree whose children are its fields, in order.

    A field whose value is None is an empty subtree, so optional parameters (a bias) need no special case.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    pytree.register_dataclass(cls)
    return cls


@overload
def flatten(tree: T) -> tuple[list[Tensor], Structure[T]]: ...
@overload
def flatten(tree: T, is_leaf: Callable[[object], TypeGuard[Leaf]]) -> tuple[list[Leaf], Structure[T]]: ...
def flatten(tree: T, is_leaf: Callable[[object], bool] | None = None) -> tuple[Sequence[object], Structure[T]]:
    """`(leaves, structure)` of `tree`; `unflatten(structure, leaves)` is its inverse."""
    leaves_, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves_, Structure(spec)


def flatten_present(tree: T) -> tuple[list[Tensor], Structure[T]]:
    """Like `flatten`, without the leaves that are None: the structure remembers where they were."""
    leaves_, spec = pytree.tree_flatten(tree)
    absent = tuple(index for index, leaf in enumerate(leaves_) if leaf is None)
    return [leaf for leaf in leaves_ if leaf is not None], Structure(spec, absent)


def unflatten(structure: Structure[T], leaves: Sequence[object]) -> T:
    """The tree with this structure and these leaves, which need not have the type of those that `flatten` returned."""
    filled = list(leaves)
    for index in structure.absent:
        filled.insert(index, None)
    return cast(T, pytree.tree_unflatten(filled, structure.spec))


@overload
def leaves(tree: Tree) -> list[Tensor]: ...
@overload
def leaves(tree: Tree, is_leaf: Callable[[object], TypeGuard[Leaf]]) -> list[Leaf]: ...
def leaves(tree: Tree, is_leaf: Callable[[object], bool] | None = None) -> Sequence[object]:
    """The leaves of `tree` in order."""
    return pytree.tree_leaves(tree, is_leaf=is_leaf)


def map_leaves(fn: Callable[..., object], tree: T, *others: Tree, is_leaf: Callable[[object], bool] | None = None) -> T:
    """Apply `fn` leaf by leaf to `tree` and to `others`, which have the same structure."""
    return cast(T, pytree.tree_map(fn, tree, *others, is_leaf=is_leaf))


@overload
def leaves_with_path(tree: Tree) -> list[tuple[str, Tensor]]: ...
@overload
def leaves_with_path(tree: Tree, is_leaf: Callable[[object], TypeGuard[Leaf]]) -> list[tuple[str, Leaf]]: ...
def leaves_with_path(tree: Tree, is_leaf: Callable[[object], bool] | None = None) -> Sequence[tuple[str, object]]:
    """`(path, leaf)` for every leaf, in order; a path joins field names, keys and indices with dots."""
    pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(".".join(_key_name(key) for key in path), leaf) for path, leaf in pairs]


def paths(tree: Tree) -> list[str]:
    """The path of every leaf, in order."""
    return [path for path, _ in leaves_with_path(tree)]


def get(tree: Tree, path: str) -> Any:
    """The subtree at `path`; the empty path gives the tree itself. Its type depends on the path, so it is `Any`."""
    for key in path.split(".") if path else ():
        tree = _child(tree, key)
    return tree


def children(tree: Tree) -> dict[str, Tree]:
    """The subtrees directly below `tree`, by the first key of their paths; those that are None are left out."""
    if isinstance(tree, dict):
        return {str(key): child for key, child in tree.items() if child is not None}
    if isinstance(tree, (list, tuple)):
        return {str(index): child for index, child in enumerate(tree) if child is not None}
    assert dataclasses.is_dataclass(tree), f"{tree!r} has no children"
    found = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return {name: child for name, child in found.items() if child is not None}


def replace(tree: T, path: str, value: Tree) -> T:
    """A copy of `tree` with the subtree at `path` replaced by `value`."""
    return cast(T, _replaced(tree, path, value))


def _replaced(tree: Tree, path: str, value: Tree) -> Tree:
    if not path:
        return value
    key, _, inner_path = path.partition(".")
    child = _replaced(_child(tree, key), inner_path, value)
    if isinstance(tree, dict):
        return {**tree, key: child}
    if isinstance(tree, (list, tuple)):
        index = int(key)
        return type(tree)([*tree[:index], child, *tree[index + 1 :]])
    assert dataclasses.is_dataclass(tree) and not isinstance(tree, type), f"{tree!r} has no children"
    return dataclasses.replace(tree, **{key: child})


def _child(tree: Tree, key: str) -> Tree:
    if isinstance(tree, dict):
        return tree[key]
    if isinstance(tree, (list, tuple)):
        return tree[int(key)]
    return getattr(tree, key)


def _key_name(key: object) -> str:
    match key:
        case pytree.GetAttrKey():
            return key.name
        case pytree.MappingKey():
            return str(key.key)
        case pytree.SequenceKey():
            return str(key.idx)
    raise AssertionError(f"pytree key {key!r} has no name")
