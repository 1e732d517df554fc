"""Torch's own samples of its operators, `op_db`, as functions to compile: each sample sharded along each dim of each operand.

`python -m tests.sharding.opinfo FILE` compiles all of them and writes what became of each as JSON, with a summary on stdout.
"""

import json
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from mpar import Mesh, P, tree, value_and_grad
from mpar.errors import MparError
from mpar.sharding import LogicalGraph, ReplicatedFallback, check, lower, simulate_graph, trace
from mpar.testing import TOLERANCES, relative_error

__all__ = ["ENTRIES", "Sample", "compile_case", "name_of", "placements", "samples_of"]

NOT_SAMPLED = {
    "empty": "its values are not defined",
    "empty_like": "its values are not defined",
    "empty_permuted": "its values are not defined",
    "empty_strided": "its values are not defined",
    "new_empty": "its values are not defined",
    "new_empty_strided": "its values are not defined",
}
"""Entries that no numbers can be compared of, and why."""


def name_of(op: OpInfo) -> str:
    """The name of an entry: some operators have several, which differ by a variant."""
    return f"{op.name} {op.variant_test_name}".strip()


ENTRIES = {name_of(op): op for op in op_db if torch.float64 in op.dtypes and name_of(op) not in NOT_SAMPLED}


@dataclass(frozen=True)
class Sample:
    """A call of an operator as a function of the tensors in its arguments."""

    fn: Callable[..., object]
    tensors: tuple[Tensor, ...]


def samples_of(op: OpInfo, count: int) -> list[Sample]:
    """At most `count` samples in float64 with something to shard, evenly taken from all that torch has of this operator."""
    torch.manual_seed(0)
    found = []
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd):
        leaves, structure = tree.flatten((sample.input, *sample.args, dict(sample.kwargs)))
        given = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not any(leaf.numel() > 1 for _, leaf in given):
            continue

        def fn(*tensors: Tensor, op: OpInfo = op, leaves=leaves, structure=structure, given=given) -> object:
            filled = list(leaves)
            for (i, _), x in zip(given, tensors, strict=True):
                filled[i] = x
            first, *args, kwargs = tree.unflatten(structure, filled)
            return op.op(first, *args, **kwargs)

        found.append(Sample(fn, tuple(leaf.detach().clone() for _, leaf in given)))
    step = max(1, math.ceil(len(found) / count))
    return found[step // 2 :: step][:count]


def gradient_of(sample: Sample) -> Callable[..., object]:
    """The gradients of a scalar of the sample's results by its floating tensors, with a cotangent that differs everywhere."""

    def scalar(floats: list[Tensor], others: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        remaining, fixed = iter(floats), iter(others)
        out = sample.fn(*(next(remaining) if x.is_floating_point() else next(fixed) for x in sample.tensors))
        for result in tree.leaves(out):
            if isinstance(result, Tensor) and result.is_complex():
                result = torch.view_as_real(result.resolve_conj())
            if isinstance(result, Tensor) and result.is_floating_point():
                total = total + result.sin().sum()
        return total

    def fn(*tensors: Tensor) -> object:
        floats = [x for x in tensors if x.is_floating_point()]
        return value_and_grad(scalar)(floats, [x for x in tensors if not x.is_floating_point()])

    return fn


def placements(tensors: Sequence[Tensor], count: int) -> Iterator[tuple[Mesh, tuple[P, ...]]]:
    """At most `count` meshes and specs: each dim of each operand alone, then dims of the same number together, over two axes."""
    dims = [(i, d) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if n > 1]
    step = max(1, math.ceil(len(dims) / max(1, count - 1)))
    for i, d in dims[::step]:
        mesh = Mesh(a=_factor(tensors[i].shape[d]))
        yield mesh, tuple(P(*[None] * d, "a") if j == i else P() for j in range(len(tensors)))
    for first, second in zip(dims, dims[1:], strict=False):
        (i, d), (j, e) = first, second
        mesh = Mesh(a=_factor(tensors[i].shape[d]), b=_factor(tensors[j].shape[e]))
        placed = {first: "a", second: "b"}
        yield mesh, tuple(P(*(placed.get((k, n)) for n in range(x.ndim))) for k, x in enumerate(tensors))
        break


def _factor(size: int) -> int:
    return next(p for p in range(2, size + 1) if size % p == 0)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample with one placement: `kind` is sharded, moved, whole, refused, raw or wrong."""

    kind: str
    detail: str = ""


def compile_case(logical: LogicalGraph, tensors: Sequence[Tensor], expected: object, mesh: Mesh, specs: Sequence[P]) -> Outcome:
    """Lower, check and simulate one case, and compare with plain torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicatedFallback)
            ranked = lower(logical, mesh, specs)
            if any(spec.partial for spec in ranked.out_specs):
                ranked = lower(logical, mesh, specs, [spec.without_partial() for spec in ranked.out_specs])
        check(ranked)
        results = simulate_graph(ranked, tensors)
    except MparError as error:
        return Outcome("ill-typed" if "ill-typed" in str(error) else "refused", str(error))
    except Exception as error:  # a raw error is what this looks for
        return Outcome("raw", f"{type(error).__name__}: {error}")
    problem = _differ(results, [x for x in tree.leaves(expected) if x is not None])
    if problem:
        return Outcome("wrong", problem)
    if ranked.fallbacks:
        return Outcome("whole", " ".join(ranked.fallbacks))
    moved = {node.target.__name__ for node in ranked.graph.nodes if getattr(node.target, "__name__", "") == "all_gather"}
    return Outcome("moved" if moved else "sharded", "")


def _differ(actual: Sequence[Tensor], expected: Sequence[object]) -> str:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        b = b if isinstance(b, Tensor) else torch.tensor(b)
        a, b = a.detach().resolve_conj(), b.detach().resolve_conj()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {tuple(a.shape)} {a.dtype}, plain torch gives {tuple(b.shape)} {b.dtype}"
        if a.is_complex():
            a, b = torch.view_as_real(a.resolve_neg()), torch.view_as_real(b.resolve_neg())
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        if not a.is_floating_point():
            if not bool(same.all()):
                return f"result {i} differs in {int((~same).sum())} of {same.numel()} places"
            continue
        odd = ~b.isfinite()
        if not bool(same[odd].all()):
            return f"result {i} has other infinities or NaNs"
        error = relative_error(a.masked_fill(odd, 0.0), b.masked_fill(odd, 0.0))
        size = float(torch.linalg.vector_norm(b.masked_fill(odd, 0.0)))
        if not error <= max(TOLERANCES[torch.float64], TOLERANCES[a.dtype]) and error * size > 1e-13:
            return f"result {i} has a relative error of {error:.1e}"
    return ""


def survey(op: OpInfo, samples: int = 4, cases: int = 7) -> list[dict]:
    """What becomes of each sample of an entry, forward and gradient, with each placement."""
    rows = []
    for number, sample in enumerate(samples_of(op, samples)):
        kinds = {"forward": sample.fn}
        if op.supports_autograd:
            kinds["gradient"] = gradient_of(sample)
        for way, fn in kinds.items():
            try:
                expected = fn(*[x.clone() for x in sample.tensors])
            except Exception as error:
                rows.append({"sample": number, "way": way, "kind": "no reference", "detail": str(error)})
                continue
            try:
                logical = trace(fn, sample.tensors)
            except MparError as error:
                rows.append({"sample": number, "way": way, "kind": "not traced", "detail": str(error)})
                continue
            except Exception as error:
                rows.append({"sample": number, "way": way, "kind": "raw trace", "detail": f"{type(error).__name__}: {error}"})
                continue
            for mesh, specs in placements(sample.tensors, cases):
                outcome = compile_case(logical, sample.tensors, expected, mesh, specs)
                shapes = [list(x.shape) for x in sample.tensors]
                rows.append(
                    {"sample": number, "way": way, "kind": outcome.kind, "detail": outcome.detail, "shapes": shapes}
                    | {"specs": f"{mesh} {[str(s) for s in specs]}"}
                )
    return rows


def main(path: str, *names: str) -> None:
    import time

    logging.disable()
    warnings.simplefilter("ignore")
    out = {}
    for name, op in ENTRIES.items():
        if not names or any(n in name for n in names):
            begun = time.time()
            try:
                out[name] = survey(op)
            except Exception as error:
                out[name] = [{"sample": -1, "way": "", "kind": "harness", "detail": repr(error)}]
            out[name].append({"time": time.time() - begun, "kind": "time", "way": ""})
    with open(path, "w") as file:
        json.dump(out, file, indent=1)
    print(Counter((row["way"], row["kind"]) for rows in out.values() for row in rows))
    print(len(out), "entries,", sum(any(r["kind"] == "sharded" for r in rows) for rows in out.values()), "shard")


if __name__ == "__main__":
    main(*sys.argv[1:])
