"""Specs and DTensor placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from mpar.dtensor import from_placements, to_placements
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec, local_shape, normalise

MESH = Mesh(dp=2, fsdp=4, tp=2)


@given(st.lists(st.sampled_from(["dim0", "dim1", "dim2", "partial", "none"]), min_size=3, max_size=3))
def test_placements_and_back(places):
    """Every spec in mesh order has placements that give it back."""
    dims = [tuple(a for a, p in zip(MESH.axes, places, strict=True) if p == f"dim{d}") for d in range(3)]
    spec = P(*dims, partial=tuple(a for a, p in zip(MESH.axes, places, strict=True) if p == "partial"))
    assert from_placements(to_placements(spec, MESH), MESH, 3) == spec


def test_placements_say_what_the_spec_says():
    """Per mesh axis: the dim that it shards, a pending sum, or a copy."""
    assert to_placements(P(None, ("dp", "tp"), partial="fsdp"), MESH) == [Shard(1), Partial(), Shard(1)]
    assert to_placements(P(), MESH) == [Replicate()] * 3


def test_other_orders_are_refused():
    """DTensor cannot say that the minor mesh axis is major in a dim."""
    with pytest.raises(ShardingError, match="another order"):
        to_placements(P(("tp", "dp")), MESH)


def test_an_axis_shards_one_dim():
    """Using an axis twice is an error, also as a pending sum."""
    with pytest.raises(ShardingError, match="more than once"):
        P("tp", "tp")
    with pytest.raises(ShardingError, match="more than once"):
        P("tp", partial="tp")


def test_trailing_dims_and_axes_of_size_one_do_not_matter():
    """Equal placements compare equal."""
    assert P("dp", None) == P("dp") and hash(P("dp", None)) == hash(P("dp"))
    assert normalise(P("dp", "tp"), Mesh(dp=2, tp=1)) == P("dp")


def test_local_shape():
    """Each dim is divided by the product of its axes."""
    assert local_shape((8, 6, 5), P(("dp", "fsdp"), "tp"), MESH) == (1, 3, 5)


def test_problems_are_all_listed():
    """Unknown axes, too many dims, sizes that do not divide, wrong order: a line each."""
    assert len(check_spec("w", (6, 5), P("fsdp", "tp"), MESH)) == 2
    assert "has no axis ['ep']" in check_spec("w", (6,), P("ep"), MESH)[0]
    assert "the spec has 2 dims" in check_spec("w", (6,), P(None, "tp"), MESH)[0]
    assert "mesh order" in check_spec("w", (8,), P(("tp", "dp")), MESH)[0]
    assert check_spec("w", (8, 2), P(("dp", "fsdp"), "tp"), MESH) == []
