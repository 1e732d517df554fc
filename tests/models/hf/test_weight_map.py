"""Weight maps: leaves that share a stored tensor, leaves of many tensors, both at once, in both directions."""

import math

import pytest
import torch

from mpar.errors import ConfigError
from mpar.models.hf._weight_map import map_leaves_to_stored

E, D, F, N, K, H = 3, 4, 5, 6, 2, 2
NAMES = {
    "layers.{i}.q_DNH": ("block.{i}.qkv", "+(n h) d -> d n h"),
    "layers.{i}.k_DKH": ("block.{i}.qkv", "+(k h) d -> d k h"),
    "layers.{i}.v_DKH": ("block.{i}.qkv", "+(k h) d -> d k h"),
    "layers.{i}.gate_DF": ("block.{i}.gate_up", "d (f +) -> d f"),
    "layers.{i}.up_DF": ("block.{i}.gate_up", "d (f +) -> d f"),
    "layers.{i}.conv_NW": ("block.{i}.conv", "n 1 w -> n w"),
    "layers.{i}.gate_EDF": ("block.{i}.experts.{e}.gate", "f d -> e d f"),
    "layers.{i}.up_DFE": ("block.{i}.experts.{e}.in", "(+ f) d -> d f e"),
    "layers.{i}.down_DFE": ("block.{i}.experts.{e}.in", "(+ f) d -> d f e"),
    "table_VD": ("table", "v d -> v d"),
}
DENSE = {"q_DNH": (D, N, H), "k_DKH": (D, K, H), "v_DKH": (D, K, H), "gate_DF": (D, F), "up_DF": (D, F), "conv_NW": (N, 3)}
SPARSE = {"gate_EDF": (E, D, F), "up_DFE": (D, F, E), "down_DFE": (D, F, E)}
SHAPES = {
    "table_VD": (8, D),
    **{f"layers.0.{name}": shape for name, shape in DENSE.items()},
    **{f"layers.1.{name}": shape for name, shape in SPARSE.items()},
}


@pytest.fixture
def leaves():
    """Leaves with all elements different; the last rows of the table are padding."""
    generator = torch.Generator().manual_seed(0)
    made = {path: torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
    made["table_VD"][7:] = 0
    return made


@pytest.fixture
def stored(leaves):
    """The stored tensors, put together by hand."""
    q, k, v = (leaves[f"layers.0.{name}"].flatten(1).T for name in ("q_DNH", "k_DKH", "v_DKH"))
    gate, up = leaves["layers.0.gate_DF"], leaves["layers.0.up_DF"]
    sparse = {name: leaves[f"layers.1.{name}"] for name in SPARSE}
    return {
        "table": leaves["table_VD"][:7],
        "block.0.qkv": torch.cat([q, k, v]),
        "block.0.gate_up": torch.stack([gate, up], -1).flatten(1),  # they alternate
        "block.0.conv": leaves["layers.0.conv_NW"][:, None],
        **{f"block.1.experts.{e}.gate": sparse["gate_EDF"][e].T for e in range(E)},
        **{f"block.1.experts.{e}.in": torch.cat([sparse["up_DFE"][..., e].T, sparse["down_DFE"][..., e].T]) for e in range(E)},
    }


def _write(leaf, value, written):
    for name in leaf.names:
        written.setdefault(name, value.new_full(leaf.stored_shape, torch.nan))
    leaf.write(value, written)


def test_leaves_are_written_to_where_they_belong(leaves, stored):
    """Writing every leaf gives exactly the tensors that were put together by hand, bit for bit."""
    written = {}
    for path, leaf in map_leaves_to_stored(NAMES, SHAPES, 7).items():
        _write(leaf, leaves[path], written)
    assert set(written) == set(stored)
    assert all(torch.equal(written[name], value) and written[name].is_contiguous() for name, value in stored.items())


@pytest.mark.parametrize("path", SHAPES)
def test_slices_are_read_alone(path, leaves, stored):
    """Each of many slices of a leaf is read right, from its own elements and no others, none of them twice."""
    leaf = map_leaves_to_stored(NAMES, SHAPES, 7)[path]
    assert all(leaf.stored_shape == tuple(stored[name].shape) for name in leaf.names)
    cuts = [[(0, size), (size // 2, size), (1, size - 1), (1, 1)] for size in leaf.shape]
    for choice in range(4 ** len(cuts)):
        bounds = [cut[choice // 4**dim % 4] for dim, cut in enumerate(cuts)]
        fetched = []

        def fetch(name, block, fetched=fetched):
            fetched.append(stored[name][block].numel())
            return stored[name][block]

        expected = leaves[path][tuple(slice(*bound) for bound in bounds)]
        part = leaf.read(fetch, bounds)
        assert torch.equal(part, expected)
        assert part.is_contiguous()
        assert sum(fetched) == int((expected != 0).sum())


def test_only_files_of_the_experts_asked_for_are_touched(stored):
    """A slice of experts asks for the tensors of those experts."""
    leaf = map_leaves_to_stored(NAMES, SHAPES, 7)["layers.1.gate_EDF"]
    names = []
    leaf.read(lambda name, block: names.append(name) or stored[name][block], [(1, 3), (0, D), (0, F)])
    assert names == ["block.1.experts.1.gate", "block.1.experts.2.gate"]


def test_parts_stand_in_the_order_of_the_map(leaves):
    """The order of the map counts, not that of the leaves."""
    swapped = {path: NAMES[path] for path in sorted(NAMES, reverse=True)}
    written = {}
    for path, leaf in map_leaves_to_stored(swapped, SHAPES, 7).items():
        _write(leaf, leaves[path], written)
    first = leaves["layers.0.v_DKH"].flatten(1).T
    assert torch.equal(written["block.0.qkv"][: K * H], first)
    assert written["block.0.qkv"].shape == (math.prod((N + 2 * K, H)), D)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({}, "no stored tensor for a_DF, b_DF"),
        ({"a_DF": ("x", "d f -> d f"), "b_DF": ("x", "d f -> d f")}, "a_DF, b_DF are all stored in x"),
        ({"a_DF": ("x.{e}", "d f -> d f"), "b_DF": ("y", "d f -> d f")}, "name in braces"),
        ({"a_DF": ("x.{d}.{f}", "-> d f"), "b_DF": ("y", "d f -> d f")}, "one name in braces"),
        ({"a_DF": ("x", "d -> d"), "b_DF": ("y", "d f -> d f")}, r"a_DF \(4, 5\)"),
    ],
)
def test_maps_that_cannot_be_are_refused(names, text):
    """Leaves without an entry, two leaves in one place, and braces that are no dim of the leaf raise ConfigError."""
    with pytest.raises(ConfigError, match=text):
        map_leaves_to_stored(names, {"a_DF": (D, F), "b_DF": (D, F)}, 7)
