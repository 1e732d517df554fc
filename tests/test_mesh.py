"""Meshes: coordinates, groups, splits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpar.errors import MeshError
from mpar.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: Mesh(**{f"a{i}": n for i, n in enumerate(sizes)}))


@given(meshes)
def test_coordinates_and_ranks_are_inverse(mesh):
    """Every rank has its own coordinates, and the last axis varies fastest."""
    seen = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert seen == sorted(set(seen)) and len(seen) == mesh.size
    assert all(mesh.rank(mesh.coordinates(rank)) == rank for rank in range(mesh.size))


@given(meshes, st.data())
def test_groups_partition_the_ranks(mesh, data):
    """Groups over any axes cover each rank once; a rank's index in its group is its position there."""
    axes = tuple(data.draw(st.permutations(mesh.axes)))[: data.draw(st.integers(0, len(mesh.axes)))]
    groups = list(mesh.groups(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(group == mesh.group(rank, axes) and group[mesh.index(rank, axes)] == rank for group in groups for rank in group)


@given(meshes, st.data())
def test_split_keeps_the_rank_order(mesh, data):
    """Outer and inner coordinate of a split axis make up the old one, rank by rank."""
    axis = data.draw(st.sampled_from(mesh.axes))
    outer = data.draw(st.sampled_from([n for n in range(1, 5) if mesh.axis_size(axis) % n == 0]))
    split = mesh.split(axis, outer)
    for rank in range(mesh.size):
        fine = split.coordinates(rank)
        assert fine[f"{axis}_outer"] * (mesh.axis_size(axis) // outer) + fine[f"{axis}_inner"] == mesh.coordinates(rank)[axis]


def test_a_laptop_holds_16384_ranks():
    """The size of a mesh costs nothing."""
    mesh = Mesh(fsdp=2048, tp=8)
    assert mesh.size == 16384 and mesh.coordinates(16383) == {"fsdp": 2047, "tp": 7}


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_refuses_sizes_that_are_no_counts(size):
    """Sizes are positive integers."""
    with pytest.raises(MeshError, match="positive integers"):
        Mesh(dp=size)


def test_bind_refuses_another_world():
    """One process cannot be two ranks, and the message says both numbers."""
    with pytest.raises(MeshError, match=r"Mesh\(dp=2\) of 2 ranks: 1 process is running"):
        Mesh(dp=2).bind()
