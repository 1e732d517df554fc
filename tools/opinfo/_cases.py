"""Cases: a sample with its tensors sharded in one way is compiled, checked, simulated and compared with plain torch."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar import Mesh, P, tree
from mpar.errors import MparError
from mpar.sharding import LogicalGraph, ReplicatedFallback, check, collectives, lower, simulate_graph, trace
from mpar.testing import TOLERANCES, relative_error
from tools.opinfo._samples import ENTRIES, Sample, calls_of

__all__ = ["Outcome", "outcomes_of", "placements", "run_case"]


def placements(tensors: Sequence[Tensor], count: int) -> Iterator[tuple[Mesh, tuple[P, ...]]]:
    """At most `count` meshes and specs: dims of operands one by one, evenly taken; the last case shards two at once."""
    dims = [(i, dim) for i, x in enumerate(tensors) for dim, size in enumerate(x.shape) if size > 1]
    step = max(1, math.ceil(len(dims) / max(1, count - 1)))
    chosen = [(place,) for place in dims[::step]] + ([(dims[0], dims[-1])] if len(dims) > 1 else [])
    for places in chosen:
        sizes = {axis: _factor(tensors[i].shape[dim]) for axis, (i, dim) in zip("ab", places, strict=False)}
        axis_of = dict(zip(places, sizes, strict=True))
        yield Mesh(**sizes), tuple(P(*(axis_of.get((i, dim)) for dim in range(x.ndim))) for i, x in enumerate(tensors))


def _factor(size: int) -> int:
    return next(p for p in range(2, size + 1) if size % p == 0)


def run_case(logical: LogicalGraph, tensors: Sequence[Tensor], expected: Any, mesh: Mesh, specs: Sequence[P]) -> str:
    """Compile one case and compare. Returns the ops that were computed whole; without any, "gathered" if shards were gathered,
    and "sharded" if none were. Raises AssertionError where numbers differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        ranked = lower(logical, mesh, specs)
        if any(spec.partial for spec in ranked.out_specs):
            ranked = lower(logical, mesh, specs, [spec.without_partial() for spec in ranked.out_specs])
    check(ranked)
    results = simulate_graph(ranked, tensors)
    dtypes = {node.meta["val"].dtype for node in ranked.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    rtol = max(TOLERANCES.get(dtype, 0.0) for dtype in (*dtypes, torch.float64))
    whole = [leaf for leaf in tree.leaves(expected) if leaf is not None]
    for i, (actual, wanted) in enumerate(zip(results, whole, strict=True)):
        _compare(actual, wanted if isinstance(wanted, Tensor) else torch.tensor(wanted), f"result {i}", rtol)
    gathered = any(node.target is collectives.all_gather for node in ranked.graph.nodes)
    return " ".join(ranked.fallbacks) or ("gathered" if gathered else "sharded")


def _compare(actual: Tensor, expected: Tensor, name: str, rtol: float) -> None:
    """As `assert_close`, for integers and complex numbers too, and with NaNs where they are expected."""
    actual, expected = (x.detach().resolve_conj().resolve_neg() for x in (actual, expected))
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (
        f"{name} is {tuple(actual.shape)} {actual.dtype}, plain torch gives {tuple(expected.shape)} {expected.dtype}"
    )
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), f"{name} differs"
        return
    odd = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same[odd].all()), f"{name}: infinities or NaNs are not where they should be"
    actual, expected = actual.masked_fill(odd, 0.0), expected.masked_fill(odd, 0.0)
    error = relative_error(actual, expected)
    negligible = float((actual - expected).double().norm()) < 1e-13  # of a result that should be zero
    assert error <= rtol or negligible, f"{name}: relative error {error:.1e} exceeds {rtol:.1e}"


@dataclass(frozen=True)
class Outcome:
    """What became of a sample with one placement: sharded, gathered, whole, refused, raw or wrong; why, where, and on what."""

    kind: str
    detail: str
    label: str
    place: str = ""


def outcomes_of(name: str, samples: int, cases: int) -> Iterator[Outcome]:
    """What becomes of the samples of an entry. Nothing is raised."""
    for sample in calls_of(ENTRIES[name], samples):
        expected = sample.fn(*(x.clone() for x in sample.tensors))
        try:
            logical = trace(sample.fn, sample.tensors)
        except Exception as error:  # errors of any kind are what is looked for
            yield Outcome(_kind_of(error), str(error), sample.label)
            continue
        for mesh, specs in placements(sample.tensors, cases):
            place = f"{[tuple(x.shape) for x in sample.tensors]} by {list(map(str, specs))} on {mesh}"
            yield _outcome(sample, logical, expected, mesh, specs, place)


def _outcome(sample: Sample, logical: LogicalGraph, expected: Any, mesh: Mesh, specs: Sequence[P], place: str) -> Outcome:
    try:
        found = run_case(logical, sample.tensors, expected, mesh, specs)
    except Exception as error:
        return Outcome(_kind_of(error), str(error), sample.label, place)
    return Outcome(found if found in ("sharded", "gathered") else "whole", found, sample.label, place)


def _kind_of(error: Exception) -> str:
    if isinstance(error, MparError):
        return "ill-typed" if "ill-typed" in str(error) else "refused"
    return "wrong" if isinstance(error, AssertionError) and "result" in str(error) else "raw"
