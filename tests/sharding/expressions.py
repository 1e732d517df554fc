"""Random pure functions of tensors, random meshes and specs: what the property tests draw from."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from mpar import Mesh, P, ops

SIZES = (1, 2, 3, 4, 6, 8)
MESHES = [(2,), (3,), (4,), (5,), (6,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 1, 2), (2, 2, 2)]

POINTWISE: list[Callable] = [
    torch.tanh, torch.sin, torch.sigmoid, torch.neg, torch.square, torch.nn.functional.silu, torch.nn.functional.gelu,
    torch.nn.functional.softplus, torch.relu, torch.abs, lambda x: x + 0.5, lambda x: 1.0 - x, lambda x: 0.3 * x,
    lambda x: x / 3.0, lambda x: 2.0 / (2.0 + x * x), lambda x: x.clamp(-0.7, 0.9), lambda x: torch.exp(x.clamp(max=1.0)),
    lambda x: x.masked_fill(x > 0.3, 0.1), lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.float().double(),
    lambda x: torch.sqrt(x * x + 1), lambda x: ops.name(x, "label"), lambda x: x * torch.full_like(x, 0.7),
    lambda x: x.detach() * x, lambda x: x.clone(), lambda x: x + torch.ones(x.shape, dtype=x.dtype, device=x.device),
]  # fmt: skip
BINARY: list[Callable] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.hypot, torch.atan2, lambda a, b: a / (b * b + 1),
    lambda a, b: torch.where(a > b, a, 0.5 * b), ops.swiglu, ops.geglu, lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: a + b + a, lambda a, b: torch.sub(a, b, alpha=2),
]  # fmt: skip
REDUCTIONS: list[Callable] = [
    lambda x, dims, keep: x.sum(dims, keepdim=keep),
    lambda x, dims, keep: x.mean(dims, keepdim=keep),
    lambda x, dims, keep: x.amax(dims, keepdim=keep),
    lambda x, dims, keep: x.logsumexp(dims, keepdim=keep),
    lambda x, dims, keep: x.sum(dims[0], keepdim=keep),
    lambda x, dims, keep: x.max(dims[0], keepdim=keep).values,
    lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep),
    lambda x, dims, keep: x.mean(),
    lambda x, dims, keep: x.sum(),
    lambda x, dims, keep: ops.sum_squares(x) * 0.1,
    lambda x, dims, keep: (x * x + 0.1).prod(dims[0], keepdim=keep),
]
ALONG: list[Callable] = [
    lambda x, dim: x.softmax(dim),
    lambda x, dim: x.log_softmax(dim),
    lambda x, dim: x.cumsum(dim) * 0.3,
    lambda x, dim: x.flip(dim),
    lambda x, dim: x.roll(1, dim),
    lambda x, dim: torch.cat([x, 0.5 * x], dim),
    lambda x, dim: torch.cat([x, x.sum(dim, keepdim=True)], dim),
    lambda x, dim: torch.stack([x, x.sin()], dim),
    lambda x, dim: x.unsqueeze(dim),
    lambda x, dim: x.select(dim, x.shape[dim] - 1),
    lambda x, dim: x.narrow(dim, x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2),
    lambda x, dim: x.chunk(2, dim)[-1],
    lambda x, dim: x.split([1, x.shape[dim] - 1], dim)[x.shape[dim] > 1],
    lambda x, dim: x.unbind(dim)[0],
    lambda x, dim: x.repeat_interleave(2, dim),
    lambda x, dim: x.index_select(dim, torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)),
    lambda x, dim: x.sort(dim).values,
    lambda x, dim: x.diff(dim=dim) if x.shape[dim] > 1 else x,
]


@dataclass(frozen=True)
class Step:
    """`fn` applied to the values at `reads`; `what` says it in words for failing examples."""

    what: str
    fn: Callable
    reads: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{self.what}{list(self.reads)}"


@dataclass(frozen=True)
class Expression:
    """A function of float64 tensors: its inputs' shapes, its steps, which values it returns."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, *args):
        values = list(args)
        for step in self.steps:
            values.append(step.fn(*(values[i] for i in step.reads)))
        return [values[i] for i in self.results]


@st.composite
def meshes(draw) -> Mesh:
    sizes = draw(st.sampled_from(MESHES))
    return Mesh(**dict(zip("abc", sizes, strict=False)))


@st.composite
def specs(draw, shape, mesh, pending=True) -> P:
    """A spec that fits `shape`: each axis shards a dim, is pending or is idle."""
    dims, partial = [()] * len(shape), []
    for axis in mesh.axes:
        size = mesh.axis_size(axis)
        fits = [i for i, n in enumerate(shape) if n % (size * mesh.axis_size(dims[i])) == 0]
        choice = draw(st.sampled_from([None, *fits, *fits, *(["partial"] if pending else [])]))
        if choice == "partial":
            partial.append(axis)
        elif choice is not None:
            dims[choice] = (*dims[choice], axis)
    return P(*dims, partial=tuple(partial))


@st.composite
def expressions(draw, mesh: Mesh, max_steps: int = 7) -> Expression:
    rank_sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).map(tuple)
    shapes = tuple(draw(st.lists(rank_sizes, min_size=1, max_size=3)))
    values = [torch.empty(shape, dtype=torch.float64, device="meta") for shape in shapes]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(st.sampled_from(KINDS))(draw, values, mesh)
        if step is None:
            continue
        values.append(step.fn(*(values[i] for i in step.reads)))
        steps.append(step)
    results = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2, unique=True))
    return Expression(shapes, tuple(steps), tuple({*results, len(values) - 1}))


def _any(draw, values, ok=lambda v: True) -> int | None:
    found = [i for i, v in enumerate(values) if ok(v) and v.numel() <= 2000]
    return draw(st.sampled_from(found[::-1])) if found else None


def _pointwise(draw, values, mesh):
    number = draw(st.integers(0, len(POINTWISE) - 1))
    return Step(f"pointwise{number}", POINTWISE[number], (_any(draw, values),))


def _binary(draw, values, mesh):
    a = _any(draw, values)
    b = _any(draw, values, lambda v: _broadcasts(v.shape, values[a].shape))
    number = draw(st.integers(0, len(BINARY) - 1))
    if BINARY[number] in (ops.swiglu, ops.geglu) and values[a].shape != values[b].shape:
        b = a
    return Step(f"binary{number}", BINARY[number], (a, b) if draw(st.booleans()) else (b, a))


def _broadcasts(left, right):
    return all(m == n or 1 in (m, n) for m, n in zip(left[::-1], right[::-1], strict=False))


def _reduction(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim)
    if x is None:
        return None
    dims = draw(st.lists(st.integers(0, values[x].ndim - 1), min_size=1, max_size=2, unique=True))
    keep, number = draw(st.booleans()), draw(st.integers(0, len(REDUCTIONS) - 1))
    return Step(f"reduction{number}({dims}, {keep})", lambda v: REDUCTIONS[number](v, dims, keep), (x,))


def _along(draw, values, mesh):
    x = _any(draw, values, lambda v: 1 <= v.ndim < 5)
    if x is None:
        return None
    dim, number = draw(st.integers(0, values[x].ndim - 1)), draw(st.integers(0, len(ALONG) - 1))
    return Step(f"along{number}({dim})", lambda v: ALONG[number](v, dim), (x,))


def _view(draw, values, mesh):
    x = _any(draw, values)
    count, shape = values[x].numel(), []
    while count > 1 and len(shape) < 3:
        size = draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0]))
        shape.append(size)
        count //= size
    if count > 1:
        shape.append(count)
    if draw(st.booleans()):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return Step(f"view({shape})", lambda v: v.reshape(shape), (x,))


def _permute(draw, values, mesh):
    x = _any(draw, values)
    order = draw(st.permutations(range(values[x].ndim)))
    return Step(f"permute({order})", lambda v: v.permute(order), (x,))


def _expand(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim < 3)
    if x is None:
        return None
    shape = [draw(st.sampled_from(SIZES)), *(n if n > 1 else draw(st.sampled_from(SIZES)) for n in values[x].shape)]
    return Step(f"expand({shape})", lambda v: v.expand(shape), (x,))


def _matmul(draw, values, mesh):
    a = _any(draw, values, lambda v: v.ndim >= 1)
    if a is None:
        return None
    inner = values[a].shape[-1]
    b = _any(draw, values, lambda v: v.ndim == 2 and inner in v.shape)
    if b is None or (values[a].ndim < 2 and draw(st.booleans())):
        return Step("matmul with itself", lambda v: (v @ v.mT if v.ndim > 1 else v @ v) / v.shape[-1], (a,))
    turn = values[b].shape[0] != inner
    return Step(f"matmul(turn={turn})", lambda v, w: v @ (w.T if turn else w) / inner, (a, b))


def _einsum(draw, values, mesh):
    a, b = _any(draw, values, lambda v: 1 <= v.ndim <= 4), _any(draw, values, lambda v: 1 <= v.ndim <= 4)
    if a is None or b is None:
        return None
    left, free = "abcd"[: values[a].ndim], list("efgh")
    right, used = "", {}
    for size in values[b].shape:
        same = [c for c, n in zip(left, values[a].shape, strict=True) if n == size and c not in right]
        right += draw(st.sampled_from(same)) if same and draw(st.booleans()) else free.pop()
        used[right[-1]] = size
    sizes = dict(zip(left, values[a].shape, strict=True)) | used
    out = "".join(c for c in draw(st.permutations(sorted(sizes))) if draw(st.booleans()))
    if math.prod(sizes[c] for c in out) > 2000:
        return None
    inner = math.prod(n for c, n in sizes.items() if c not in out)
    equation = f"{left},{right}->{out}"
    fn = ops.einsum if draw(st.booleans()) else torch.einsum
    return Step(f"{fn.__module__}.einsum {equation}", lambda v, w: fn(equation, v, w) / inner, (a, b))


def _norm(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim >= 1)
    if x is None:
        return None
    gain = _any(draw, values, lambda v: v.shape == values[x].shape[-1:])
    which = draw(st.sampled_from(["rms", "layer", "torch layer"]))
    if which == "torch layer":
        fn = lambda v, g=None: torch.nn.functional.layer_norm(v, v.shape[-1:], g, eps=0.1)  # noqa: E731
    elif which == "rms":
        fn = lambda v, g=None: ops.rms_norm(v, g, eps=0.1)  # noqa: E731
    else:
        fn = lambda v, g=None: ops.layer_norm(v, g, eps=0.1)  # noqa: E731
    return Step(f"{which} norm", fn, (x,) if gain is None else (x, gain))


def _embedding(draw, values, mesh):
    table = _any(draw, values, lambda v: v.ndim == 2)
    if table is None:
        return None
    rows = values[table].shape[0]
    count = draw(st.sampled_from(SIZES))
    fn = ops.embedding if draw(st.booleans()) else torch.nn.functional.embedding
    return Step(f"{fn.__name__}({count} ids)", lambda w: fn(torch.arange(count, device=w.device) * 7 % rows, w), (table,))


def _loss(draw, values, mesh):
    x = _any(draw, values, lambda v: 2 <= v.ndim <= 3)
    if x is None:
        return None

    def labels(v, num_classes):
        ids = torch.arange(v.shape[:-1].numel(), device=v.device).reshape(v.shape[:-1]) * 5 % num_classes
        return torch.where(ids % 3 == 1, -100, ids)

    head = _any(draw, values, lambda v: v.ndim == 2 and v.shape[0] == values[x].shape[-1])
    if head is None or draw(st.booleans()):
        return Step("cross_entropy", lambda v: ops.cross_entropy(v, labels(v, v.shape[-1]))[0] * 0.1, (x,))
    return Step(
        "linear_cross_entropy",
        lambda v, w: ops.linear_cross_entropy(v, w, labels(v, w.shape[1]), chunk=5)[0] * 0.1,
        (x, head),
    )


def _attention(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim == 3 and v.numel() <= 400)
    if x is None:
        return None
    heads, window = draw(st.sampled_from([2, 4])), draw(st.sampled_from([None, 2]))

    def fn(v):
        q = torch.stack([v * (i + 1) / heads for i in range(heads)], 2)
        k = torch.stack([v.sin(), v.cos()], 2)
        out, lse = ops.attention(q, k, k * 0.5, window=window)
        return out + 0.1 * lse.unsqueeze(-1)

    return Step(f"attention({heads} heads, window {window})", fn, (x,))


def _angles(v):
    return torch.arange(v.shape[1], device=v.device, dtype=v.dtype)[:, None] * torch.arange(
        1, v.shape[-1] // 2 + 1, device=v.device, dtype=v.dtype
    )


def _rope(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim == 4 and v.shape[-1] % 2 == 0)
    if x is None:
        return None

    def fn(v):
        angle = _angles(v)
        return ops.rope(v, angle.cos()[None], angle.sin()[None])

    return Step("rope", fn, (x,))


def _constrain(draw, values, mesh):
    x = _any(draw, values)
    spec = draw(specs(values[x].shape, mesh, pending=False))
    return Step(f"constrain({spec})", lambda v: ops.constrain(v, spec), (x,))


def _triangle(draw, values, mesh):
    x = _any(draw, values, lambda v: v.ndim >= 2)
    return None if x is None else Step("tril", lambda v: v.tril(), (x,))


KINDS = [
    _pointwise, _pointwise, _binary, _binary, _reduction, _along, _along, _view, _view, _permute, _expand, _matmul, _einsum,
    _norm, _embedding, _loss, _attention, _rope, _constrain, _triangle,
]  # fmt: skip
