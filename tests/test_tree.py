"""Pytrees: paths, access, replacement."""

import torch

from mpar import tree


@tree.struct
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None


TREE = {"a": Pair(torch.ones(1)), "b": (torch.zeros(2), Pair(torch.ones(3), torch.ones(4)))}


def test_paths_name_leaves():
    """A path joins names, keys and indices; what is None has none."""
    assert tree.paths(TREE) == ["a.left", "b.0", "b.1.left", "b.1.right"]
    assert all(tree.get(TREE, path) is leaf for path, leaf in tree.leaves_with_path(TREE))


def test_replace_changes_one_subtree():
    """The rest is the same objects."""
    new = tree.replace(TREE, "b.1.left", "x")
    assert tree.get(new, "b.1.left") == "x" and tree.get(new, "b.0") is TREE["b"][0] and new["a"] is TREE["a"]


def test_flatten_and_back():
    """Structure and leaves give the tree back."""
    leaves, structure = tree.flatten(TREE)
    assert tree.paths(tree.unflatten(structure, leaves)) == tree.paths(TREE)
