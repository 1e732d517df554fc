"""torch's flex_attention becomes the primitive where its mask is proved to be one of the primitive's, else it is refused."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mpar import Mesh, P, jit, testing
from mpar.errors import TraceError

S = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
MESH = Mesh(dp=2, tp=2)
SPECS = (P("dp", "tp"), P("dp", "tp"), P("dp", "tp"))


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 3)


def documents(b, h, i, j):
    return (i >= j) & (DOCUMENTS[b, i] == DOCUMENTS[b, j])


def documents_both_ways(b, h, i, j):
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


def packed_windows(b, h, i, j):
    return window(b, h, i, j) & documents(b, h, i, j)


def padded(b, h, i, j):
    return (i >= j) & (i < 9) & (j < 9)


def prefix(b, h, i, j):
    return (i >= j) | (j < 4)


def other_for_each_head(b, h, i, j):
    return (i >= j) & (i - j < 2 + h)


def every_second(b, h, i, j):
    return (i >= j) & ((i - j) % 2 == 0)


def block_mask(mask_mod, batch=2, heads=1):
    return create_block_mask(mask_mod, batch, heads, S, S, device="cpu", BLOCK_SIZE=4)


def operands(num_kv=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, heads, S, 8, generator=generator, dtype=torch.float64) for heads in (4, num_kv, num_kv)]


@pytest.fixture(autouse=True)
def quiet():
    """torch warns that it does not compile flex_attention here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reference(q, k, v, mask_mod, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    visible = torch.stack([mask_mod(torch.tensor(b), 0, i, j) for b in range(2)])[:, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v), scores.logsumexp(-1)


SAME = [causal, window, documents, documents_both_ways, packed_windows, padded]


@pytest.mark.parametrize("mask_mod", SAME, ids=lambda fn: fn.__name__)
def test_known_masks_become_the_primitive(mask_mod):
    """Over a sharded batch and sharded heads without communication, in the value and the gradients."""
    mask, args = block_mask(mask_mod), operands()

    def loss(q, k, v):
        return flex_attention(q, k, v, block_mask=mask).sin().sum()

    lowered = jit(torch.func.grad(loss, argnums=(0, 1, 2)), mesh=MESH, in_specs=SPECS).lower(*args)
    assert lowered.collectives() == []
    assert "attention_bwd(" in str(lowered)
    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(reference(*leaves, mask_mod)[0].sin().sum(), leaves)
    for actual, gradient in zip(lowered.simulate(*args), expected, strict=True):
        testing.assert_close(actual, gradient.nan_to_num())


def test_without_a_mask_with_groups_scale_and_lse():
    """Everything is visible; query heads share kv heads; the log-sum-exp is the natural one."""

    def fn(q, k, v):
        out, aux = flex_attention(q, k, v, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    args = operands(num_kv=2)
    out, lse = jit(fn, mesh=MESH, in_specs=SPECS).lower(*args).simulate(*args)
    expected, expected_lse = reference(*args, lambda b, h, i, j: (i + j) > -1, scale=0.3)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse)


def test_a_mask_made_inside():
    """As many write it: the mask is made in the function."""
    args = operands()
    fn = lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask(causal))  # noqa: E731
    testing.assert_close(jit(fn, mesh=MESH, in_specs=SPECS).lower(*args).simulate(*args), reference(*args, causal)[0])


HERE = r".*mpar.ops.attention.*sharding/test_flex_attention.py:\d+"


@pytest.mark.parametrize("mask_mod", [prefix, other_for_each_head, every_second], ids=lambda fn: fn.__name__)
def test_other_masks_are_refused(mask_mod):
    """With the primitive to use."""
    mask = block_mask(mask_mod, heads=4)
    with pytest.raises(TraceError, match="(?s)its mask is not known" + HERE):
        jit(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), mesh=MESH).lower(*operands())


def test_masks_of_arguments_and_changed_scores_are_refused():
    """What a mask reads must be known when the function is compiled; a score_mod is not looked into."""

    def by_argument(q, k, v, documents):
        mask_mod = lambda b, h, i, j: documents[b, i] == documents[b, j]  # noqa: E731
        return flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, 2, 1, S, S, device="cpu", BLOCK_SIZE=4))

    with pytest.raises(TraceError, match="(?s)its mask is not known" + HERE):
        jit(by_argument, mesh=MESH).lower(*operands(), DOCUMENTS)
    with pytest.raises(TraceError, match="(?s)flex_attention with a score_mod" + HERE):
        jit(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, *_: s * 2), mesh=MESH).lower(*operands())
