"""Attention's masks, log-sum-exp, blind rows and both code paths, against a loop over pairs in float64."""

import math

import pytest
import torch

from mpar import ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.sequence import _attention

Q_ORDER, K_ORDER = torch.tensor([0, 9, 1, 8, 2, 7, 3]), torch.tensor([5, 4, 3, 2, 1, 6, 7, 8, 9])
Q_DOCUMENTS = torch.tensor([[0, 0, 1, 1, -1, 2, 2], [5, 5, 5, 5, 5, 5, 6]])
K_DOCUMENTS = torch.tensor([[0, 0, 1, 1, -1, -1, 3, 3, 3], [5] * 9])
DOCUMENTS = {"q_documents": Q_DOCUMENTS, "k_documents": K_DOCUMENTS}
ORDERS = {"q_order": Q_ORDER, "k_order": K_ORDER}
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0, -math.inf, 0.9], dtype=torch.float64)
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "scaled": {"scale": 0.3},
    "window": {"window": 3},
    "window without causal": {"window": 2, "causal": False},
    "orders": ORDERS,
    "query order alone": {"q_order": Q_ORDER},
    "orders and window": {**ORDERS, "window": 3},
    "documents": DOCUMENTS,
    "documents, full": {**DOCUMENTS, "causal": False},
    "everything": {**DOCUMENTS, **ORDERS, "window": 5},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks": SINKS},
    "sinks and soft cap": {**DOCUMENTS, "window": 3, "soft_cap": 1.5, "sinks": SINKS},
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


def _sees(b, i, j, *, q_order=None, k_order=None, q_documents=None, k_documents=None, causal=True, window=None, scale=None):
    query, key = i if q_order is None else int(q_order[i]), j if k_order is None else int(k_order[j])
    if (causal and key > query) or (window is not None and query - key >= window):
        return False
    return q_documents is None or int(q_documents[b, i]) == int(k_documents[b, j]) != -1


def reference(q, k, v, *, sinks=None, soft_cap=None, **mask):
    """Row by row over the keys that are seen and the sink; a row that sees none is constant."""
    (B, S, N, H), (M, K) = q.shape, k.shape[1:3]
    scale = mask.get("scale") or 1 / math.sqrt(H)
    out, lse = [], []
    for b in range(B):
        for i in range(S):
            keys = [j for j in range(M) if _sees(b, i, j, **mask)]
            for n in range(N):
                kv = n // (N // K)
                scores = k[b, keys, kv] @ q[b, i, n] * scale
                weights = torch.exp(scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap))
                total = weights.sum() if sinks is None else weights.sum() + sinks[n].exp()
                blind = not keys and (sinks is None or not float(total.detach()))
                out.append(v.new_zeros(v.shape[-1]) if blind else weights @ v[b, keys, kv] / total)
                lse.append(v.new_tensor(-math.inf) if blind else total.log())
    return torch.stack(out).view(B, S, N, -1), torch.stack(lse).view(B, S, N)


def _operands(make_tensor, dtype=torch.float64, size_v=6):
    return [make_tensor(shape, dtype, requires_grad=True) for shape in ((2, 7, 6, 6), (2, 9, 3, 6), (2, 9, 3, size_v))]


def _weighted(out, lse, dout, dlse):
    return (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()


@pytest.mark.parametrize("size_v", [6, 4, 9])
@each_mask
def test_masks_match_a_loop_over_pairs(mask, size_v, make_tensor):
    """Output, lse and gradients of both, for every mask and head size of v; blind rows give 0, -inf and 0."""
    operands = _operands(make_tensor, size_v=size_v)
    out, lse = ops.attention(*operands, **mask)
    expected_out, expected_lse = reference(*operands, **mask)
    testing.assert_close(out, expected_out, name="out")
    testing.assert_close(lse, expected_lse, name="lse")
    dout, dlse = make_tensor(out.shape, torch.float64), make_tensor(lse.shape, torch.float64)
    for weight in (0.0, 1.0):
        actual = torch.autograd.grad(_weighted(out, lse, dout, weight * dlse), operands, retain_graph=True)
        expected = torch.autograd.grad(_weighted(expected_out, expected_lse, dout, weight * dlse), operands, retain_graph=True)
        for name, a, e in zip("qkv", actual, expected, strict=True):
            testing.assert_close(a, e, name=f"d{name}")


@each_mask
def test_sinks_match_a_loop_over_pairs(mask, make_tensor):
    """A sink takes its share of every row, and has the gradient of a score whose value is zero, through out and through lse."""
    operands, sinks = _operands(make_tensor), make_tensor((6,), torch.float64, requires_grad=True)
    mask = {**mask, "sinks": sinks}
    out, lse = ops.attention(*operands, **mask)
    expected_out, expected_lse = reference(*operands, **mask)
    testing.assert_close(out, expected_out, name="out")
    testing.assert_close(lse, expected_lse, name="lse")
    dout, dlse = make_tensor(out.shape, torch.float64), make_tensor(lse.shape, torch.float64)
    for weight in (0.0, 1.0):
        leaves = (*operands, sinks)
        actual = torch.autograd.grad(_weighted(out, lse, dout, weight * dlse), leaves, retain_graph=True)
        expected = torch.autograd.grad(_weighted(expected_out, expected_lse, dout, weight * dlse), leaves, retain_graph=True)
        for name, a, e in zip(("q", "k", "v", "sinks"), actual, expected, strict=True):
            testing.assert_close(a, e, name=f"d{name}")


@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if not {"sinks", "soft_cap"} & mask.keys()])
def test_plain_formulas_match_the_cpu_kernel(name, make_tensor):
    """What runs on other devices gives the results of what runs on the CPU."""
    mask = MASKS[name]
    q, k, v = (x.detach() for x in _operands(make_tensor))
    names = ("q_order", "k_order", "q_documents", "k_documents")
    visible = _attention._visible(q, k, *(mask.get(n) for n in names), mask.get("causal", True), mask.get("window"))
    scale = mask.get("scale", 6**-0.5)
    out, lse = _attention._plain(q, k, v, visible, scale)
    expected = ops.attention(q, k, v, **mask)
    testing.assert_close(out, expected[0], name="out")
    testing.assert_close(lse, expected[1], name="lse")
    dout, dlse = make_tensor(out.shape, torch.float64), make_tensor(lse.shape, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(_weighted(*ops.attention(*leaves, **mask), dout, dlse), leaves)
    shielded, dlse = lse.masked_fill(lse == -math.inf, math.inf), dlse.masked_fill(lse == -math.inf, 0.0)
    for a, e in zip(_attention._plain_backward(q, k, v, visible, out, shielded, dout, dlse, scale), grads, strict=True):
        testing.assert_close(a, e, name="gradient")


def test_rows_that_see_nothing_in_the_first_block_of_keys(make_tensor):
    """Keys come in blocks of some hundreds: a row that sees only the last ones, or none, is right all the same."""
    shapes = (1, 3, 2, 4), (1, 1100, 1, 4), (1, 1100, 1, 4)
    q, k, v = (make_tensor(shape, torch.float64, requires_grad=True) for shape in shapes)
    documents = {"q_documents": torch.tensor([[7, 8, 9]]), "k_documents": torch.tensor([[7] * 3 + [0] * 1090 + [8] * 7])}
    out, lse = ops.attention(q, k, v, causal=False, **documents)
    for row, keys in enumerate((slice(0, 3), slice(1093, 1100))):
        scores = torch.einsum("nh,mh->nm", q[0, row], k[0, keys, 0]) / 2
        testing.assert_close(out[0, row], torch.softmax(scores, -1) @ v[0, keys, 0], name=f"row {row}")
    assert lse[0, 2].tolist() == [-math.inf, -math.inf] and not out[0, 2].any()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][0, 2].any() and not grads[1][0, 3:1093].any()


def test_lse_merges_two_halves_of_the_keys(make_tensor):
    """Attention over halves of the keys, merged by lse, has the value and gradients of attention over all: the ring's step."""
    operands = [make_tensor(shape, torch.float64, requires_grad=True) for shape in ((1, 5, 2, 4), (1, 6, 2, 4), (1, 6, 2, 4))]
    q, k, v = operands
    parts = [ops.attention(q, k[:, s], v[:, s], causal=False) for s in (slice(0, 2), slice(2, 6))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (lse - total).exp().unsqueeze(-1) for out, lse in parts)
    whole, _ = ops.attention(q, k, v, causal=False)
    testing.assert_close(merged, whole, name="out")
    dout = make_tensor(whole.shape, torch.float64)
    for a, e in zip(torch.autograd.grad(merged, operands, dout), torch.autograd.grad(whole, operands, dout), strict=True):
        testing.assert_close(a, e, name="gradient")


def test_blind_rows_ignore_their_lse_cotangent(make_tensor):
    """Whatever a merge makes of lse -inf, even a cotangent that is NaN, a row that sees nothing has gradient 0."""
    operands = _operands(make_tensor)
    _, lse = ops.attention(*operands, **DOCUMENTS)
    grads = torch.autograd.grad(lse, operands, torch.where(lse == -math.inf, math.nan, 1.0))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 4].any()


def test_no_keys_or_no_queries(make_tensor):
    """Zero keys make every row blind; zero queries give empty results."""
    out, lse = ops.attention(make_tensor((1, 2, 2, 4)), make_tensor((1, 0, 2, 4)), make_tensor((1, 0, 2, 3)))
    assert not out.any() and out.shape == (1, 2, 2, 3) and (lse == -math.inf).all()
    out, lse = ops.attention(make_tensor((1, 0, 2, 4)), make_tensor((1, 2, 2, 4)), make_tensor((1, 2, 2, 3)))
    assert out.shape == (1, 0, 2, 3) and lse.shape == (1, 0, 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": (7, 6, 6)}, ShapeError, "must be \\(B, S, N, H\\)"),
        ({"k": (2, 9, 3, 5), "v": (2, 8, 3, 6)}, ShapeError, "(?s)fit q.*fit k"),
        ({"k": (2, 9, 4, 6), "v": (2, 9, 4, 6)}, ShapeError, "4 kv heads do not divide 6"),
        ({"q_order": Q_ORDER[:3]}, ShapeError, "q_order is \\(3,\\), must be \\(7,\\)"),
        ({"q_documents": Q_DOCUMENTS}, ShapeError, "both or neither"),
        ({"q_order": Q_ORDER.double()}, DtypeError, "int32 or int64"),
        ({"window": 0}, ConfigError, "window is 0"),
        ({"soft_cap": 0.0}, ConfigError, "soft_cap is 0.0"),
        ({"sinks": torch.zeros(3)}, ShapeError, "sinks is \\(3,\\), must be \\(6,\\)"),
        ({"sinks": torch.zeros(6).int()}, DtypeError, "sinks are scores"),
    ],
    ids=str,
)
def test_wrong_operands_are_refused(changes, error, message, make_tensor):
    """Each operand that does not fit is named."""
    shapes = {"q": (2, 7, 6, 6), "k": (2, 9, 3, 6), "v": (2, 9, 3, 6)}
    tensors = [make_tensor(changes.get(name, shape)) for name, shape in shapes.items()]
    with pytest.raises(error, match=message):
        ops.attention(*tensors, **{name: value for name, value in changes.items() if name not in shapes})


def test_mixed_dtypes_are_refused(make_tensor):
    """q, k and v share one floating dtype."""
    q, k, v = _operands(make_tensor)
    with pytest.raises(DtypeError, match="same floating dtype"):
        ops.attention(q, k.float(), v)
