"""Transforms between stored tensors and leaves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.errors import ConfigError
from mpar.models.hf._rearrange import parse_rearrange
from tests.tiers import examples


@st.composite
def transforms(draw):
    """(text, sizes of names, padding of names): up to four names, merged and ordered at random."""
    names = draw(st.permutations(["a", "b", "c", "d"]))[: draw(st.integers(1, 4))]
    left, i = [], 0
    while i < len(names):
        width = draw(st.integers(1, len(names) - i))
        left.append(names[i : i + width])
        i += width
    text = " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in left)
    right = draw(st.permutations(names))
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    padding = {name: draw(st.sampled_from([0, 0, 1, 3])) for name in names}
    bounds = {}
    for name in names:
        bounds[name] = sorted(draw(st.tuples(*[st.integers(0, sizes[name] + padding[name])] * 2)))
    return f"{text} -> {' '.join(right)}", left, right, sizes, padding, bounds


def by_hand(stored, left, right, sizes, padding):
    """The leaf, element by element."""
    leaf = torch.zeros([sizes[name] + padding[name] for name in right])
    for flat in range(stored.numel()):
        index, rest = {}, flat
        for name in reversed([name for group in left for name in group]):
            rest, index[name] = divmod(rest, sizes[name])
        leaf[tuple(index[name] for name in right)] = stored.flatten()[flat]
    return leaf


@settings(max_examples=examples(150), deadline=None)
@given(transforms())
def test_slices_are_those_of_the_whole_and_only_they_are_read(case):
    """Any slice of the leaf is read right, and exactly its unpadded elements are fetched, each once."""
    text, left, right, sizes, padding, bounds = case
    stored = torch.arange(1.0, 1 + math.prod(sizes.values())).reshape([math.prod(sizes[n] for n in group) for group in left])
    fetched = []

    def fetch(block):
        fetched.append(stored[block].numel())
        return stored[block]

    leaf = by_hand(stored, left, right, sizes, padding)
    part = parse_rearrange(text).read(fetch, sizes, [bounds[name] for name in right])
    expected = leaf[tuple(slice(*bounds[name]) for name in right)]
    assert torch.equal(part, expected)
    assert part.is_contiguous()
    assert sum(fetched) == int((expected != 0).sum())


@settings(max_examples=examples(100), deadline=None)
@given(transforms())
def test_write_is_the_inverse_of_read(case):
    """Reading the whole leaf and writing it gives the stored tensor back, bit for bit."""
    text, left, right, sizes, padding, _ = case
    stored = torch.randn([math.prod(sizes[n] for n in group) for group in left])
    transform = parse_rearrange(text)
    leaf = transform.read(lambda block: stored[block], sizes, [(0, sizes[name] + padding[name]) for name in right])
    written = torch.full_like(stored, torch.nan)
    transform.write(written, leaf, sizes)
    assert torch.equal(written, stored)


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a -> b",
        "a b -> a",
        "a a -> a",
        "(a b -> a b",
        "a -> (a)",
        "(a (b c)) -> a b c",
        "() a -> a",
        "+a +b -> a b",
        "+a (b +) -> a b",
        "(a+ b) -> a b",
        "a 1 -> a 1",
    ],
)
def test_bad_transforms_are_refused(text):
    """What is no transform raises ConfigError that quotes it."""
    with pytest.raises(ConfigError, match="transform"):
        parse_rearrange(text)
