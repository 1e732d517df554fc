"""The chunked scan and its convolution against the plain recurrence, one token after the other, in float64."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mpar import Mesh, P, jit, ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.sequence._causal_conv1d import causal_conv1d_p
from mpar.ops.sequence._ssd_scan import ssd_scan_p

B, N, H, K = 2, 4, 3, 5
F64 = torch.float64
SIZES = [(1, 4), (7, 7), (8, 4), (13, 4), (13, 1), (13, 256)]
DOCUMENTS = torch.tensor([[0, 0, 1, 0, 0, 0, 4, 4, 5, 5, 5, 5, -1], [3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2]])


def recurrence(x, dt, a, b, c, d=None, state=None, documents=None):
    """The definition; also the state after the last token."""
    share = x.shape[2] // b.shape[2]
    left = torch.zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3], dtype=x.dtype) if state is None else state
    rows = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            left = left * (documents[:, t] == documents[:, t - 1]).to(x.dtype).view(-1, 1, 1, 1)
        key, query = (z[:, t].repeat_interleave(share, dim=1) for z in (b, c))
        decay = torch.exp(dt[:, t] * a)
        left = decay[:, :, None, None] * left + torch.einsum("bn,bnh,bnk->bnhk", dt[:, t], x[:, t], key)
        y = torch.einsum("bnhk,bnk->bnh", left, query)
        rows.append(y if d is None else y + d[:, None] * x[:, t])
    return torch.stack(rows, 1), left


def operands(make_tensor, size, groups, dtype=F64, given=True):
    """x, dt, a, b, c, and if `given` d and a state, such as models have them."""
    shapes = [(B, size, N, H), (B, size, N), (N,), (B, size, groups, K), (B, size, groups, K)]
    x, dt, a, b, c = (make_tensor(shape, dtype) for shape in shapes)
    extra = [make_tensor((N,), dtype), make_tensor((B, N, H, K), dtype)] if given else [None, None]
    return [x, torch.nn.functional.softplus(dt), -torch.exp(a), b, c, *extra]


def scan(x, dt, a, b, c, d=None, state=None, documents=None, chunk=4):
    return ops.ssd_scan(x, dt, a, b, c, d, state_BNHK=state, documents_BS=documents, chunk=chunk)


def with_gradients(fn, values, documents, seed=1, **options):
    """Both results, and the gradient of each operand for cotangents drawn from `seed`."""
    values = [None if x is None else x.detach().clone().requires_grad_() for x in values]
    results = fn(*values, documents, **options)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(y.shape, generator=generator, dtype=F64).to(y.dtype) for y in results]
    leaves = [x for x in values if x is not None]
    return results, torch.autograd.grad(results, leaves, weights)


@pytest.mark.parametrize("given", [True, False], ids=["all operands", "no skip and state"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("size", "chunk"), SIZES, ids=str)
def test_scan_is_the_recurrence(size, chunk, groups, packed, given, make_tensor):
    """Output, final state and the gradient of every operand, whether or not chunks fit the sequence or the documents."""
    values = operands(make_tensor, size, groups, given=given)
    documents = DOCUMENTS[:, :size] if packed else None
    expected, expected_grads = with_gradients(recurrence, values, documents)
    actual, grads = with_gradients(scan, values, documents, chunk=chunk)
    for name, y, wanted in zip(("y", "final"), actual, expected, strict=True):
        testing.assert_close(y, wanted, name=name)
    for name, grad, wanted in zip(("x", "dt", "a", "b", "c", "d", "state"), grads, expected_grads, strict=False):
        testing.assert_close(grad, wanted, name=f"gradient of {name}")


@pytest.mark.parametrize("which", [0, 1], ids=["y", "final"])
def test_gradient_of_one_result(which, make_tensor):
    """Where only the output or only the final state is used, the other counts as a zero cotangent."""
    values = operands(make_tensor, 7, 2)
    wanted = [x.clone().requires_grad_() for x in values]
    leaves = [x.clone().requires_grad_() for x in values]
    expected = torch.autograd.grad(recurrence(*wanted)[which].square().sum(), wanted, materialize_grads=True)
    actual = torch.autograd.grad(scan(*leaves)[which].square().sum(), leaves, materialize_grads=True)
    for i, (grad, other) in enumerate(zip(actual, expected, strict=True)):
        testing.assert_close(grad, other, name=f"gradient {i}")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_narrow_operands_are_widened(dtype, rtol, make_tensor):
    """Sums are float32: half precision costs the rounding of operands and results alone, with steps and decays in float32."""
    values = operands(make_tensor, 13, 2, dtype)
    values[1], values[2] = values[1].float(), values[2].float()
    (y, final), grads = with_gradients(scan, values, DOCUMENTS)
    expected, expected_grads = with_gradients(recurrence, [x.double() for x in values], DOCUMENTS)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    assert [grad.dtype for grad in grads] == [x.dtype for x in values]
    for actual, wanted in zip((y, final, *grads), (*expected, *expected_grads), strict=True):
        testing.assert_close(actual, wanted, rtol=rtol)


def test_sums_of_narrow_operands_are_wide(make_tensor):
    """With every operand in bfloat16 the final state is float32, and as exact as float32 is on those operands."""
    values = operands(make_tensor, 13, 2, torch.bfloat16)
    _, final = scan(*values)
    assert final.dtype == torch.float32
    testing.assert_close(final, recurrence(*(x.double() for x in values))[1])


def test_a_row_goes_on_from_its_state(make_tensor):
    """Two scans, the second from the final state of the first, are one scan."""
    x, dt, a, b, c, d, state = operands(make_tensor, 13, 2)
    whole, final = scan(x, dt, a, b, c, d, state)
    first, middle = scan(*(z[:, :6] if z.ndim > 1 else z for z in (x, dt, a, b, c, d)), state)
    second, last = scan(*(z[:, 6:] if z.ndim > 1 else z for z in (x, dt, a, b, c, d)), middle)
    testing.assert_close(torch.cat([first, second], 1), whole, name="y")
    testing.assert_close(last, final, name="final state")


def test_fast_decay_stays_finite(make_tensor):
    """Decays far below the smallest float give zeros, not infinities: only quotients of at most one are exponentiated."""
    x, dt, a, b, c, d, state = operands(make_tensor, 13, 2, torch.float32)
    (y, final), grads = with_gradients(scan, [x, dt + 50, a * 100, b, c, d, state], None)
    assert all(torch.isfinite(z).all() for z in (y, final, *grads))


def test_no_tokens_leave_the_state(make_tensor):
    """An empty sequence has an empty output, the state as it was, and its gradient."""
    values = operands(make_tensor, 0, 2)
    (y, final), grads = with_gradients(scan, values, None)
    assert y.shape == (B, 0, N, H)
    assert torch.equal(final, values[6])
    assert not torch.equal(grads[6], torch.zeros_like(final))


def test_vmap_equals_a_loop(make_tensor):
    """Batched over all operands or one, values and gradients equal those of single calls."""
    values = operands(make_tensor, 7, 2)
    many = [torch.stack([x, 0.5 * x, 2 * x]) for x in values]

    def value(*xs):
        return scan(*xs)[0]

    gradient = torch.func.grad(lambda *xs: value(*xs).square().sum(), argnums=tuple(range(7)))
    for dims in ((0,) * 7, (0, *[None] * 6), (None, None, 0, *[None] * 4)):
        mixed = [x if dim is None else xs for x, xs, dim in zip(values, many, dims, strict=True)]
        examples = [[x if dim is None else x[i] for x, dim in zip(mixed, dims, strict=True)] for i in range(3)]
        actual = torch.func.vmap(value, dims)(*mixed)
        testing.assert_close(actual, torch.stack([value(*xs) for xs in examples]), name=f"{dims}")
        grads = torch.func.vmap(gradient, dims)(*mixed)
        for grad, wanted in zip(grads, zip(*(gradient(*xs) for xs in examples), strict=True), strict=True):
            testing.assert_close(grad, torch.stack(wanted), name=f"gradient {dims}")


SCAN_SPECS = {
    "groups": [P("a", None, "b"), P("a", None, "b"), P("b"), P("a", None, "b"), P("a", None, "b"), P("b"), P("a", "b")],
    "heads of one group": [P(None, None, ("a", "b")), P(None, None, ("a", "b")), P(("a", "b")), P(), P(), P("a"), P("a")],
    "sequence": [P("b", "a"), P("b", "a"), P(), P("b", "a"), P("b", "a"), P(), P()],
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("placed", SCAN_SPECS)
def test_sharded_scan_is_the_scan(placed, groups, make_tensor):
    """On simulated ranks, with heads, groups, rows or tokens sharded, values and gradients are those of one rank."""
    values, documents = operands(make_tensor, 8, groups), DOCUMENTS[:, :8]
    mesh = Mesh(a=2, b=2)

    def fitted(spec, x):
        pairs = zip(spec.padded(x.ndim), x.shape, strict=True)
        return P(*(dim if size % mesh.axis_size(dim) == 0 else None for dim, size in pairs))

    def fn(*xs):
        loss = lambda *xs: scan(*xs, documents)[0].sin().sum() + scan(*xs, documents)[1].cos().sum()  # noqa: E731
        return (*scan(*xs, documents), *torch.func.grad(loss, argnums=tuple(range(7)))(*xs))

    specs = tuple(fitted(spec, x) for spec, x in zip(SCAN_SPECS[placed], values, strict=True))
    lowered = jit(fn, mesh=mesh, in_specs=specs).lower(*values)
    assert lowered.ranked.fallbacks == ()
    for actual, wanted in zip(lowered.simulate(*values), fn(*values), strict=True):
        testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"dt": torch.zeros(B, 7, 3)}, ShapeError, "dt must be"),
        ({"x": torch.zeros(B, 7, N)}, ShapeError, "x must be"),
        ({"b": torch.zeros(B, 7, 3, K), "c": torch.zeros(B, 7, 3, K)}, ShapeError, "3 groups do not divide 4 heads"),
        ({"state": torch.zeros(B, N, K, H)}, ShapeError, "state must be"),
        ({"documents": torch.zeros(B, 6).long()}, ShapeError, "documents must be"),
        ({"documents": torch.zeros(B, 7)}, DtypeError, "int32 or int64"),
        ({"a": torch.zeros(N).long()}, DtypeError, "must be floating"),
        ({"chunk": 0}, ConfigError, "chunk is 0"),
    ],
    ids=str,
)
def test_bad_operands_are_refused(change, error, match, make_tensor):
    """Operands that do not fit are named."""
    values = dict(zip(("x", "dt", "a", "b", "c", "d", "state"), operands(make_tensor, 7, 2), strict=True))
    with pytest.raises(error, match=match):
        scan(**{**values, **change})


def convolution(x, weight, bias=None, state=None, documents=None):
    """One token and one weight at a time."""
    width = weight.shape[-1]
    rows = []
    for i in range(x.shape[0]):
        ahead = torch.zeros(width - 1, *x.shape[2:], dtype=x.dtype) if state is None else state[i]
        padded = torch.cat([ahead, x[i]])
        columns = []
        for s in range(x.shape[1]):
            total = torch.zeros(x.shape[2:], dtype=x.dtype) if bias is None else bias
            for back in range(width):
                between = [] if documents is None else documents[i, max(s - back, 0) : s + 1].tolist()
                if len(set(between)) <= 1:
                    total = total + weight[..., width - 1 - back] * padded[width - 1 + s - back]
            columns.append(total)
        rows.append(torch.stack(columns))
    return torch.stack(rows)


def conv(x, weight, bias=None, state=None, documents=None):
    return ops.causal_conv1d(x, weight, bias, state_BTC=state, documents_BS=documents)


@pytest.mark.parametrize("given", [True, False], ids=["all operands", "no bias and state"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(("size", "width"), [(1, 4), (2, 4), (13, 4), (13, 1), (5, 2)], ids=str)
@pytest.mark.parametrize("channels", [(6,), (2, 3)], ids=str)
def test_convolution_is_the_sum(channels, size, width, packed, given, make_tensor):
    """Output and gradients, with rows shorter than the kernel, a state before them, and documents that come back."""
    values = [make_tensor((B, size, *channels), F64), make_tensor((*channels, width), F64)]
    values += [make_tensor(channels, F64), make_tensor((B, width - 1, *channels), F64)] if given else [None, None]
    documents = DOCUMENTS[:, :size] if packed else None
    (expected, expected_grads), (actual, grads) = (
        with_gradients(lambda *xs, fn=fn: (fn(*xs),), values, documents) for fn in (convolution, conv)
    )
    testing.assert_close(actual[0], expected[0], name="y")
    for i, (grad, wanted) in enumerate(zip(grads, expected_grads, strict=True)):
        testing.assert_close(grad, wanted, name=f"gradient {i}")


def test_convolution_is_that_of_torch(make_tensor):
    """Without documents it is torch's conv1d with as many groups as channels."""
    x, weight, bias = make_tensor((B, 9, 6), torch.float32), make_tensor((6, 4), torch.float32), make_tensor((6,), torch.float32)
    expected = torch.nn.functional.conv1d(x.double().mT, weight.double().unsqueeze(1), bias.double(), padding=3, groups=6)
    testing.assert_close(conv(x, weight, bias), expected[..., :9].mT)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_sharded_convolution_is_the_convolution(dim, make_tensor):
    """On simulated ranks, with rows, tokens or channels sharded."""
    x, weight, bias = make_tensor((B, 4, 4, 2), F64), make_tensor((4, 2, 4), F64), make_tensor((4, 2), F64)
    specs = [P(*("a" if i == dim else None for i in range(4))), P("a", "b") if dim > 1 else P("b"), P()]
    documents = DOCUMENTS[:, :4]

    def fn(*xs):
        loss = lambda *xs: conv(*xs, None, documents).sin().sum()  # noqa: E731
        return conv(*xs, None, documents), *torch.func.grad(loss, argnums=(0, 1, 2))(*xs)

    lowered = jit(fn, mesh=Mesh(a=2, b=2), in_specs=tuple(specs)).lower(x, weight, bias)
    assert lowered.ranked.fallbacks == ()
    for actual, wanted in zip(lowered.simulate(x, weight, bias), fn(x, weight, bias), strict=True):
        testing.assert_close(actual, wanted)


def test_convolution_under_vmap(make_tensor):
    """Batched over rows, or over weights too, it equals single calls."""
    x, weight = make_tensor((3, B, 5, 6), F64), make_tensor((3, 6, 4), F64)
    expected = torch.stack([conv(x[i], weight[i]) for i in range(3)])
    testing.assert_close(torch.func.vmap(conv)(x, weight), expected, name="both")
    expected = torch.stack([conv(x[i], weight[0]) for i in range(3)])
    testing.assert_close(torch.func.vmap(conv, (0, None))(x, weight[0]), expected, name="rows")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"weight": torch.zeros(5, 4)}, ShapeError),
        ({"weight": torch.zeros(6, 0)}, ShapeError),
        ({"bias": torch.zeros(5)}, ShapeError),
        ({"state": torch.zeros(B, 4, 6)}, ShapeError),
        ({"documents": torch.zeros(B, 4).long()}, ShapeError),
        ({"documents": torch.zeros(B, 5)}, DtypeError),
        ({"x": torch.zeros(B, 5, 6).long()}, DtypeError),
    ],
    ids=str,
)
def test_bad_convolutions_are_refused(change, error):
    """Operands that do not fit raise."""
    values = {"x": torch.zeros(B, 5, 6), "weight": torch.zeros(6, 4)}
    with pytest.raises(error, match="causal_conv1d of x"):
        conv(**{**values, **change})


WORKSPACES = {
    "scan": (ssd_scan_p, {"chunk": 64}),
    "scan backward": (ssd_scan_p.bwd, {"chunk": 64}),
    "convolution": (causal_conv1d_p, {}),
    "convolution backward": (causal_conv1d_p.bwd, {}),
}


class _Peak(TorchDispatchMode):
    """The most bytes that storages made under it had together after any op."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, out if isinstance(out, (tuple, list)) else (out,)):
            storage = x.untyped_storage()
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: pair for key, pair in self.storages.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WORKSPACES)
def test_workspace_is_a_bound(case, dtype, make_tensor):
    """What an implementation holds beside operands and results is at most what its cost says, and at least half of it."""
    primitive, params = WORKSPACES[case]
    shapes = [(2, 256, 8, 32), (2, 256, 8), (8,), (2, 256, 2, 32), (2, 256, 2, 32), (8,)]
    if "convolution" in case:
        shapes = [(2, 256, 300), (300, 4), (300,)]
    values = [*(make_tensor(shape, dtype) for shape in shapes), None, torch.zeros(2, 256).long()]
    if "backward" in case:
        values += [make_tensor(shapes[0], dtype)] + [None] * ("scan" in case)
    with torch.no_grad(), _Peak() as mode:
        copies = [None if x is None else x.clone() for x in values]
        results = primitive.impl(*copies, **params)
    held = sum(x.nbytes for x in (*values, *(results if isinstance(results, tuple) else (results,))) if x is not None)
    workspace = primitive.cost(*values, **params).workspace
    assert 0.5 * workspace <= mode.peak - held <= workspace, (mode.peak - held, workspace)
