"""Segments that are hard to split in one way or another, and random ones."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from mpar import ops

D, F = 4, 6


@dataclass
class Case:
    """A segment with its parameters, x and context."""

    fn: Any
    params: tuple
    x: Any
    context: dict


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def shared_weight(params, x, context, *, training):
    (w,) = params
    return torch.tanh(x @ w) @ w, {}


def parent_and_child(params, x, context, *, training):
    a, b, c = params
    parent = x @ a
    child = torch.sin(parent) @ b
    return parent @ c + child * parent, {}


def chunks(params, x, context, *, training):
    (w,) = params
    left, right = torch.chunk(x @ w, 2, dim=-1)
    first, second, third = torch.split(torch.cat([left * right, x], -1), [1, 2, 3], -1)
    return torch.cat([third, first.cos(), second * first], -1), {}


def weight_only_branch(params, x, context, *, training):
    w, v = params
    return x @ w, {"decay": (v * v).sum() + v.exp().mean()}


def output_without_input(params, x, context, *, training):
    w, v = params
    return {"a": x @ w, "b": torch.tanh(v @ w)}, {}


def unused_input(params, x, context, *, training):
    (w,) = params
    return (context["c"] * 2) @ w, {}


def partly_unused_input(params, x, context, *, training):
    (w,) = params
    return x["a"] @ w, {}


def integers(params, x, context, *, training):
    (w,) = params
    return {"ids": x["ids"] + 1, "h": torch.tanh(x["h"] @ w) + x["ids"][:, None]}, {}


def unused_parameter(params, x, context, *, training):
    w, _ = params
    return x @ w, {}


def tied_embedding(params, x, context, *, training):
    (table,) = params
    hidden = ops.embedding(context["ids"], table) + x
    return None, {"loss": ops.cross_entropy(torch.tanh(hidden) @ table.t(), context["ids"])[0]}


def several_leaves(params, x, context, *, training):
    w, v = params
    a, (b, c) = x["a"], x["bc"]
    return {"p": a @ w + b, "q": (c, (b * c) @ v)}, {}


def side_losses(params, x, context, *, training):
    w, v = params
    hidden = torch.tanh(x @ w)
    return hidden @ v, {"aux": hidden.square().mean(), "z": (hidden @ v).exp().sum() * 1e-2}


def passed_through(params, x, context, *, training):
    (w,) = params
    return {"same": x, "new": x @ w}, {}


def loss_alone(params, x, context, *, training):
    w, gain = params
    return None, {"loss": (ops.rms_norm(x, gain, eps=1e-6) @ w).square().sum()}


def block(params, x, context, *, training):
    gain, bias, gate, up, down = params
    normed = ops.rms_norm(x, gain, eps=1e-6)
    return x + (ops.swiglu(normed @ gate + bias, normed @ up) @ down), {}


def context_scale(params, x, context, *, training):
    return (x * torch.sin(context["c"])) @ params[0], {}


def no_parameters(params, x, context, *, training):
    return torch.sin(x), {}


def first(params, x, context, *, training):
    return torch.sin(context["c"] @ params[0]), {}


SQUARE, X = normal(D, D), normal(3, D)
CASES = {
    "shared_weight": Case(shared_weight, (SQUARE,), X, {}),
    "parent_and_child": Case(parent_and_child, (SQUARE, SQUARE.sin(), SQUARE.cos()), X, {}),
    "chunks": Case(chunks, (SQUARE,), X, {}),
    "weight_only_branch": Case(weight_only_branch, (SQUARE, normal(F)), X, {}),
    "output_without_input": Case(output_without_input, (SQUARE, normal(2, D)), X, {}),
    "unused_input": Case(unused_input, (SQUARE,), X, {"c": normal(2, D)}),
    "partly_unused_input": Case(partly_unused_input, (SQUARE,), {"a": X, "b": normal(2, 2)}, {}),
    "integers": Case(integers, (SQUARE,), {"ids": torch.tensor([3, 1, 2]), "h": X}, {}),
    "unused_parameter": Case(unused_parameter, (SQUARE, normal(F)), X, {}),
    "tied_embedding": Case(tied_embedding, (normal(8, D),), normal(2, 3, D), {"ids": torch.tensor([[1, 2, 7], [0, 2, 2]])}),
    "several_leaves": Case(several_leaves, (SQUARE, normal(D, F)), {"a": X, "bc": (normal(1, D), normal(2, 1, D))}, {}),
    "side_losses": Case(side_losses, (normal(D, F), normal(F, D)), X, {}),
    "passed_through": Case(passed_through, (SQUARE,), X, {}),
    "loss_alone": Case(loss_alone, (normal(D, F), normal(D)), X, {}),
    "block": Case(block, (normal(D), normal(F), normal(D, F), normal(D, F) + 1, normal(F, D)), X, {}),
    "no_parameters": Case(no_parameters, (), X, {}),
    "first": Case(first, (normal(D, F),), None, {"c": normal(2, D)}),
}


STEPS = [
    torch.add,
    torch.mul,
    torch.matmul,
    torch.matmul,
    ops.swiglu,
    lambda a, b: torch.tanh(a),
    lambda a, b: a.t(),
    lambda a, b: ops.rms_norm(a, b[0], eps=1e-6),
    lambda a, b: a + b.sum(0, keepdim=True),
    lambda a, b: torch.cat(torch.split(a, [1, 3], 1)[::-1], 1),
    lambda a, b: torch.cat([a[:2], b[2:]], 0),
]


def random_case(seed, *, mixed=False):
    """A segment of random steps on square matrices, each of which may read parameters, x, context and earlier values.

    `mixed`: parameters and context are first joined with x, so that nothing follows from them alone.
    """
    draw = random.Random(seed)
    steps = [(draw.choice(STEPS), draw.randrange(5 + i), draw.randrange(5 + i)) for i in range(14)]
    results = [draw.randrange(5 + len(steps) // 2, 5 + len(steps)) for _ in range(3)]

    def fn(params, x, context, *, training):
        a, b, c = x["a"], x["b"], context["c"]
        values = [params[0] @ a, params[1] * b, a, b, c + a] if mixed else [*params, a, b, c]
        for step, left, right in steps:
            values.append(step(values[left], values[right]))
        return (values[results[0]], values[results[1]]), {"loss": values[results[2]].tanh().sum()}

    generator = torch.Generator().manual_seed(seed)
    p, q, a, b, c = torch.randn(5, D, D, generator=generator, dtype=torch.float64).unbind()
    return Case(fn, (p.clone(), q.clone()), {"a": a.clone(), "b": b.clone()}, {"c": c.clone()})
