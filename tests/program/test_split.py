"""The split of backward: both halves together against plain torch, and against the backward that they are made of."""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mpar import Mesh, models, ops, testing, tree
from mpar.chain import Segment
from mpar.precision import precision
from mpar.program._partition import RecomputePolicy
from mpar.program._run import ALONE, load
from mpar.program._segments import SegmentCode, compile_function, compile_segment, trace_segment
from mpar.program._simulate import run_ranks
from mpar.program._split import split_segment
from mpar.program._units import make_units
from mpar.shards import shard
from mpar.spec import P
from mpar.strategy import Strategy, preset

POLICIES = [
    RecomputePolicy("none"),
    RecomputePolicy("full"),
    RecomputePolicy("selective"),
    RecomputePolicy("budget", budget=600),
]
CPU = torch.device("cpu")


def run(code, operands, comm=ALONE):
    """What a compiled code gives."""
    with torch.no_grad():
        return load(code.kind.name, code.kind.source, code.kind.constants, CPU)(list(operands), comm)


def run_halves(code, primals, kept, cotangents, comm=ALONE):
    """(gradients of parameters, of x, bytes of distinct storages that W was given) by the two halves."""
    split = split_segment(code)
    given = [
        *(primals[i] for i in split.input_reads),
        *(kept[i] for i in split.input_kept),
        *(cotangents[i] for i in split.input_cotangents),
    ]
    out = run(split.input, given, comm)
    assert len(out) == code.traced.num_x + split.num_crossing
    dx, crossing = out[: code.traced.num_x], out[code.traced.num_x :]
    given = [
        *(primals[i] for i in split.weight_reads),
        *(kept[i] for i in split.weight_kept),
        *crossing,
        *(cotangents[i] for i in split.weight_cotangents),
    ]
    return run(split.weight, given, comm), dx


def calls(*codes):
    """How often each op that is not a view is called; tensors in a collective count one by one."""
    count = Counter()
    for code in codes:
        functions = dict(re.findall(r"^(f\d+) = (.*)$", code.kind.source, re.MULTILINE))
        for name in re.findall(r" = (f\d+)\(", code.kind.source):
            op = functions[name].replace("_.Tensor", ".Tensor")  # in place or not
            found = re.match(r"torch\.ops\.aten\.(\w+)\.(\w+)", op)
            if found is None or not getattr(getattr(torch.ops.aten, found[1]), found[2]).is_view:
                count[op] += 1
        for use in code.kind.collectives:
            count[use.op] += use.tensors
    del count["torch.ops.aten.reshape.default"]
    return count


# Segments of our own, on one rank


D, F = 4, 6


@dataclass
class Case:
    """A segment with its parameters, x, context, and parameters of which it makes a gradient on the way."""

    fn: Any
    params: tuple
    x: Any
    context: dict


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def shared_weight(params, x, context):
    (w,) = params
    return torch.tanh(x @ w) @ w, {}


def parent_and_child(params, x, context):
    a, b, c = params
    parent = x @ a
    child = torch.sin(parent) @ b
    return parent @ c + child * parent, {}


def chunks(params, x, context):
    (w,) = params
    left, right = torch.chunk(x @ w, 2, dim=-1)
    first, second, third = torch.split(torch.cat([left * right, x], -1), [1, 2, 3], -1)
    return torch.cat([third, first.cos(), second * first], -1), {}


def weight_only_branch(params, x, context):
    w, v = params
    return x @ w, {"decay": (v * v).sum() + v.exp().mean()}


def output_without_input(params, x, context):
    w, v = params
    return {"a": x @ w, "b": torch.tanh(v @ w)}, {}


def unused_input(params, x, context):
    (w,) = params
    return (context["c"] * 2) @ w, {}


def partly_unused_input(params, x, context):
    (w,) = params
    return x["a"] @ w, {}


def unused_parameter(params, x, context):
    w, _ = params
    return x @ w, {}


def tied_embedding(params, x, context):
    (table,) = params
    hidden = ops.embedding(context["ids"], table) + x
    return None, {"loss": ops.cross_entropy(torch.tanh(hidden) @ table.t(), context["ids"])[0]}


def several_leaves(params, x, context):
    w, v = params
    a, (b, c) = x["a"], x["bc"]
    return {"p": a @ w + b, "q": (c, (b * c) @ v)}, {}


def side_losses(params, x, context):
    w, v = params
    hidden = torch.tanh(x @ w)
    return hidden @ v, {"aux": hidden.square().mean(), "z": (hidden @ v).exp().sum() * 1e-2}


def passed_through(params, x, context):
    (w,) = params
    return {"same": x, "new": x @ w}, {}


def loss_alone(params, x, context):
    w, gain = params
    return None, {"loss": (ops.rms_norm(x, gain, eps=1e-6) @ w).square().sum()}


def block(params, x, context):
    gain, bias, gate, up, down = params
    normed = ops.rms_norm(x, gain, eps=1e-6)
    return x + (ops.swiglu(normed @ gate + bias, normed @ up) @ down), {}


CASES = {
    "shared_weight": Case(shared_weight, (normal(D, D),), normal(3, D), {}),
    "parent_and_child": Case(parent_and_child, (normal(D, D), normal(D, D + 0), normal(D, D).cos()), normal(3, D), {}),
    "chunks": Case(chunks, (normal(D, D),), normal(3, D), {}),
    "weight_only_branch": Case(weight_only_branch, (normal(D, D), normal(F)), normal(3, D), {}),
    "output_without_input": Case(output_without_input, (normal(D, D), normal(2, D)), normal(3, D), {}),
    "unused_input": Case(unused_input, (normal(D, D),), normal(3, D), {"c": normal(2, D)}),
    "partly_unused_input": Case(partly_unused_input, (normal(D, D),), {"a": normal(3, D), "b": normal(2, 2)}, {}),
    "unused_parameter": Case(unused_parameter, (normal(D, D), normal(F)), normal(3, D), {}),
    "tied_embedding": Case(tied_embedding, (normal(8, D),), normal(2, 3, D), {"ids": torch.tensor([[1, 2, 7], [0, 2, 2]])}),
    "several_leaves": Case(
        several_leaves, (normal(D, D), normal(D, F)), {"a": normal(3, D), "bc": (normal(1, D), normal(2, 1, D))}, {}
    ),
    "side_losses": Case(side_losses, (normal(D, F), normal(F, D)), normal(3, D), {}),
    "passed_through": Case(passed_through, (normal(D, D),), normal(3, D), {}),
    "loss_alone": Case(loss_alone, (normal(D, F), normal(D)), normal(3, D), {}),
    "block": Case(block, (normal(D), normal(F), normal(D, F), normal(D, F) + 1, normal(F, D)), normal(3, D), {}),
    "no_parameters": Case(lambda params, x, context: (torch.sin(x), {}), (), normal(3, D), {}),
    "first": Case(lambda params, x, context: (torch.sin(context["c"] @ params[0]), {}), (normal(D, F),), None, {"c": normal(2, D)}),
}


def meta(t):
    return None if t is None else torch.empty_like(t, device="meta")


def compile_case(case, recompute, grad_dtype=torch.float64):
    """The segment of a case on one rank."""
    params, x, context = tree.map_leaves(meta, (case.params, case.x, case.context))
    paths = tuple(f"p{i}" for i in range(len(params)))
    traced = trace_segment(Segment("s", case.fn, paths), params, x, context, [grad_dtype] * len(params))
    specs = [[P()] * n for n in (traced.num_params, traced.num_x, traced.num_context, len(traced.x_out))]
    return compile_segment("s", traced, Mesh(dp=1), preset("ddp"), *specs, recompute)


def primals_of(case):
    return [*case.params, *(tree.leaves(case.x) if case.x is not None else []), *tree.leaves(case.context)]


@pytest.mark.parametrize("recompute", POLICIES, ids=lambda p: p.kind)
@pytest.mark.parametrize("name", CASES)
def test_halves_equal_autograd(name, recompute):
    """The halves give every gradient that plain torch gives, zero for what has none, and the bits of the backward."""
    case = CASES[name]
    code = compile_case(case, recompute)
    primals = primals_of(case)
    out = run(code.forward, primals)
    results, kept = out[: len(out) - code.num_kept], out[len(out) - code.num_kept :]
    cotangents = [normal(*result.shape) + 0.5 for result in results]
    d_params, d_x = run_halves(code, primals, kept, cotangents)

    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in primals]
    num_params, num_x = code.traced.num_params, code.traced.num_x
    x = None if case.x is None else tree.unflatten(tree.flatten(case.x)[1], leaves[num_params : num_params + num_x])
    context = tree.unflatten(tree.flatten(case.context)[1], leaves[num_params + num_x :])
    value, losses = case.fn(tuple(leaves[:num_params]), x, context)
    targets = [*tree.leaves(() if value is None else value), *(losses[key] for key in sorted(losses))]
    wanted = leaves[: num_params + num_x]
    reached = [(t, dy) for t, dy in zip(targets, cotangents, strict=True) if t.requires_grad]
    expected = torch.autograd.grad([t for t, _ in reached], wanted, [dy for _, dy in reached], allow_unused=True)
    for index, (actual, grad, leaf) in enumerate(zip([*d_params, *d_x], expected, wanted, strict=True)):
        testing.assert_close(actual, torch.zeros_like(leaf.detach()) if grad is None else grad, name=f"gradient {index}")

    whole = run(code.backward, [*(primals[i] for i in code.reads), *kept, *cotangents])
    assert all(torch.equal(a, b) for a, b in zip([*d_params, *d_x], whole, strict=True))
