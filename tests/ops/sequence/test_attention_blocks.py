"""Attention by blocks on the CPU: the formula in float64, what is worked on, and how much memory masks take."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mpar import ops, testing
from mpar.ops.sequence import _attention_blocks as blocks
from mpar.ops.sequence._attention import attention_p
from tests.ops.storages import Storages

F64 = torch.float64


def zigzag(num_ranks: int, size: int) -> list[Tensor]:
    """What each rank holds of 0 .. size - 1: chunk i from the front and chunk i from the back."""
    chunks = torch.arange(size).chunk(2 * num_ranks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(num_ranks)]


def visible(q_order, k_order, *, causal=True, window=None, q_documents=None, k_documents=None):
    """Pair by pair, by the words of `attention`."""
    seen = torch.ones(1, len(q_order), len(k_order), dtype=torch.bool)
    if causal:
        seen = seen & (k_order[None, :] <= q_order[:, None])
    if window is not None:
        seen = seen & (q_order[:, None] - k_order[None, :] < window)
    if q_documents is not None:
        seen = seen & (q_documents[:, :, None] == k_documents[:, None, :]) & (q_documents[:, :, None] >= 0)
    return seen


def formula(q, k, v, seen):
    """Softmax over what is seen, for all pairs at once; a row that sees nothing gives 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bsnh,bmnh->bsnm", q, k) / math.sqrt(q.shape[3])
    weights = torch.exp(scores) * seen.unsqueeze(2)
    blind = ~seen.any(-1).unsqueeze(2)
    total = weights.sum(-1).masked_fill(blind, 1.0)
    return torch.einsum("bsnm,bmnh->bsnh", weights / total.unsqueeze(-1), v), total.log().masked_fill(blind, -math.inf)


PARTS = zigzag(4, 512)
GATHERED = torch.cat(PARTS)
SHUFFLED = torch.randperm(512, generator=torch.Generator().manual_seed(0))
RUNS = {
    "first rank of all": (PARTS[0], GATHERED),
    "last rank of all": (PARTS[3], GATHERED),
    "another rank's keys": (PARTS[1], PARTS[2]),
    "own keys": (PARTS[2], PARTS[2]),
    "keys start before": (torch.arange(300) + 50, torch.arange(500)),
    "keys start after": (torch.arange(500), torch.arange(300) + 50),
    "no key seen": (torch.arange(100), torch.arange(90) + 200),
    "scattered": (SHUFFLED, GATHERED),
    "not given": (None, None),
}
HIDING = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 150},
    "one key": {"window": 1},
    "window, full": {"window": 40, "causal": False},
}


def one_by_one(generator: torch.Generator, size: int) -> Tensor:
    """Two rows of documents of unlike lengths, one after the other, the last places padding."""
    begins = torch.zeros(2, size, dtype=torch.int64)
    begins.scatter_(1, torch.randint(1, size, (2, 4), generator=generator), 1)
    documents = begins.cumsum(1)
    documents[:, size - 9 :] = -1
    return documents


def mixed(generator: torch.Generator, size: int) -> Tensor:
    """Two rows in which every place is of any document or padding."""
    return torch.randint(-1, 3, (2, size), generator=generator)


@pytest.mark.parametrize("documents", [None, mixed, one_by_one], ids=["", "mixed documents", "documents"])
@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING.keys())
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_blocks_are_the_formula(runs, hiding, documents, make_tensor):
    """Output, lse and gradients of both, whatever runs the orders have and whatever hides."""
    S, M = (512 if order is None else len(order) for order in runs)
    q, k, v = (make_tensor(shape, F64, requires_grad=True) for shape in ((2, S, 2, 4), (2, M, 1, 4), (2, M, 1, 3)))
    masks = dict(hiding)
    if documents is not None:
        generator = torch.Generator().manual_seed(1)
        masks |= {f"{x}_documents": documents(generator, n) for x, n in (("q", S), ("k", M))}
    out, lse = ops.attention(q, k, v, q_order=runs[0], k_order=runs[1], **masks)
    q_order, k_order = (torch.arange(512) if order is None else order for order in runs)
    seen = visible(q_order, k_order, **masks)
    expected_out, expected_lse = formula(q, k, v, seen)
    testing.assert_close(out, expected_out, name="out")
    blind = ~seen.any(-1, keepdim=True).expand(lse.shape)
    assert torch.equal(lse == -math.inf, blind)
    testing.assert_close(lse.masked_fill(blind, 0.0), expected_lse.masked_fill(blind, 0.0), name="lse")
    dout, dlse = make_tensor(out.shape, F64), make_tensor(lse.shape, F64)
    losses = ((o * dout).sum() + (s.masked_fill(blind, 0.0) * dlse).sum() for o, s in ((out, lse), (expected_out, expected_lse)))
    actual, expected = (torch.autograd.grad(loss, (q, k, v)) for loss in losses)
    for name, a, e in zip("qkv", actual, expected, strict=True):
        testing.assert_close(a, e, name=f"d{name}")


def joined(generator: torch.Generator, num_runs: int) -> Tensor:
    """Runs of 64 to 99 in a random order, with gaps between their values or without."""
    starts = torch.randperm(num_runs, generator=generator) * 99
    return torch.cat([start + torch.arange(int(torch.randint(64, 100, (), generator=generator))) for start in starts])


def check_blocks(q_order, k_order, causal, window, q_documents=None, k_documents=None):
    seen = visible(q_order, k_order, causal=causal, window=window, q_documents=q_documents, k_documents=k_documents)
    found = torch.zeros_like(seen, dtype=torch.int)
    masks = blocks.Masks(q_order, k_order, q_documents, k_documents, causal, window)
    for block in blocks.blocks_of(len(q_order), len(k_order), masks):
        part = seen[block.batch, block.rows, block.keys].int()
        inside = torch.ones_like(part).tril() if block.aligned else torch.ones_like(part)
        found[block.batch, block.rows, block.keys] += part if block.masked else inside
    assert torch.equal(found, seen.int())


@pytest.mark.parametrize("seed", range(12))
def test_every_visible_pair_of_many_runs_is_in_one_block(seed):
    """Blocks do not overlap; those without a mask have visible pairs only, and none is left out."""
    generator = torch.Generator().manual_seed(seed)
    q_order, k_order = joined(generator, 1 + seed % 4), joined(generator, 4 - seed % 4)
    check_blocks(q_order, k_order, bool(seed % 3), (None, 1, 70, 130, 400)[seed % 5])


@pytest.mark.parametrize("seed", range(12))
def test_every_visible_pair_of_documents_is_in_one_block(seed):
    """The same where runs are of several documents, which each row of the batch has elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    q_order, k_order = joined(generator, 1 + seed % 4), joined(generator, 4 - seed % 4)
    documents = [one_by_one(generator, len(order)) for order in (q_order, k_order)]
    check_blocks(q_order, k_order, bool(seed % 3), (None, 1, 70, 130, 400)[seed % 5], *documents)


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_visible_pair_of_two_runs_is_in_one_block(causal, window):
    """The same for runs of few that lie to each other in every way."""
    for num_queries, num_keys, start in itertools.product((1, 2, 5), (1, 2, 5), range(-7, 8)):
        check_blocks(10 + start + torch.arange(num_queries), 10 + torch.arange(num_keys), causal, window)


class _Work:
    """Stands for a kernel and counts the pairs of a query and a key that it is given."""

    def __init__(self, kernel, operand, masks):
        self.kernel, self.operand, self.masks, self.pairs, self.masked = kernel, operand, masks, 0, 0

    def __call__(self, *operands):
        q, k, (aligned, bias) = operands[self.operand], operands[self.operand + 1], operands[self.masks : self.masks + 2]
        rows, keys = q.shape[2], k.shape[2]
        self.pairs += sum(min(i + 1, keys) for i in range(rows)) if aligned else rows * keys
        self.masked = max(self.masked, 0 if bias is None else bias[0].numel())
        return self.kernel(*operands)


@pytest.fixture
def work(monkeypatch):
    """Counts of the forward and of the backward kernel."""
    counts = _Work(blocks.flash, 0, 3), _Work(blocks.flash_backward, 1, 6)
    monkeypatch.setattr(blocks, "flash", counts[0])
    monkeypatch.setattr(blocks, "flash_backward", counts[1])
    return counts


def attend(make_tensor, S, M, **masks):
    q, k, v = (make_tensor((1, n, 1, 4), requires_grad=True) for n in (S, M, M))
    ops.attention(q, k, v, **masks)[0].sum().backward()


def test_ranks_of_a_zigzag_work_equally(work, make_tensor):
    """Every rank works on half of its pairs, forward and backward, and no mask is made."""
    pairs = []
    for order in PARTS:
        before = [kernel.pairs for kernel in work]
        attend(make_tensor, 128, 512, q_order=order, k_order=GATHERED)
        pairs.append([kernel.pairs - b for kernel, b in zip(work, before, strict=True)])
    assert all(abs(count / (128 * 512 / 2) - 1) < 0.01 for counts in pairs for count in counts), pairs
    assert work[0].masked == work[1].masked == 0


def test_steps_of_a_ring_work_equally(work, make_tensor):
    """Over the keys of one rank at a time too: half of the pairs of all steps together."""
    for order in PARTS:
        before = work[0].pairs
        for keys in PARTS:
            attend(make_tensor, 128, 128, q_order=order, k_order=keys)
        assert abs((work[0].pairs - before) / (128 * 512 / 2) - 1) < 0.01


@pytest.mark.parametrize(("window", "most"), [(64, 4.5), (300, 2.1), (2000, 1.6)], ids=str)
def test_what_a_window_hides_is_not_computed(window, most, work, make_tensor):
    """Without orders too: the pairs are a small multiple of those that are seen, and masks are of some blocks only."""
    attend(make_tensor, 5000, 5000, window=window)
    seen = sum(min(i + 1, window) for i in range(5000))
    for kernel in work:
        assert seen <= kernel.pairs < most * seen
        assert 0 < kernel.masked <= blocks.ROWS**2


def test_runs_of_queries_that_share_their_keys(make_tensor):
    """Blocks with queries of their own, but not with keys of their own: gradients of the keys are sums."""
    orders = torch.cat([torch.arange(200, 300), torch.arange(400, 500)]), torch.arange(100)
    found = blocks.blocks_of(200, 100, blocks.Masks(*orders, None, None, True, None))
    assert [(block.rows, block.keys) for block in found] == [(slice(0, 100), slice(0, 100)), (slice(100, 200), slice(0, 100))]
    operands = [make_tensor((2, size, 2, 16), F64, requires_grad=True) for size in (200, 100, 100)]
    out, _ = ops.attention(*operands, q_order=orders[0], k_order=orders[1])
    expected, _ = formula(*operands, visible(*orders))
    testing.assert_close(out, expected, name="out")
    for a, e in zip(*(torch.autograd.grad(x.square().sum(), operands) for x in (out, expected)), strict=True):
        testing.assert_close(a, e, name="gradient")


def test_blocks_are_kept_by_what_masks_hold(monkeypatch):
    """Equal documents elsewhere in memory are cut once; others, or the same ones changed in place, are cut again."""
    cut, counted = blocks._cut_all, []
    monkeypatch.setattr(blocks, "_cut_all", lambda *given: counted.append(1) or cut(*given))
    monkeypatch.setattr(blocks, "_KEPT", {})
    monkeypatch.setattr(blocks, "_MOST_KEPT", 3)
    documents = torch.zeros(1, 100).long()

    def found(x, causal=True):
        return blocks.blocks_of(100, 100, blocks.Masks(None, None, x, x, causal, None))

    assert found(documents) == found(documents.clone()) and len(counted) == 1
    before, documents[0, 60:] = found(documents), 1
    assert found(documents) != before and len(counted) == 2
    assert found(documents, causal=False) != found(documents) and len(counted) == 3
    for start in range(10, 50):
        documents[0, start:] = start
        found(documents)
    assert len(blocks._KEPT) == 3 and len(counted) == 43


def test_tokens_of_no_document_have_zeros(make_tensor):
    """Where no block is, memory that nothing wrote is not seen: between and behind documents, and in rows that have none."""
    documents = torch.full((3, 512), -1)
    documents[0, :200], documents[0, 230:400], documents[1, 100:512] = 0, 1, 7
    q, k, v = (make_tensor((3, 512, heads, 16), requires_grad=True) for heads in (4, 2, 2))
    torch.use_deterministic_algorithms(True)  # then memory is filled with NaN
    try:
        out, lse = ops.attention(q, k, v, q_documents=documents, k_documents=documents)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    nowhere = documents == -1
    assert all(not x[nowhere].any() and x[~nowhere].isfinite().all() for x in (out, *grads))
    assert (lse[nowhere] == -torch.inf).all()


def test_documents_are_computed_apart(work, make_tensor):
    """Only the pairs within each of the documents of a row, half of them if causal, and no mask; of many short ones all pairs."""
    documents = torch.arange(4).repeat_interleave(torch.tensor([200, 56, 250, 6]))[None]
    attend(make_tensor, 512, 512, q_documents=documents, k_documents=documents)
    assert [kernel.pairs for kernel in work] == [sum(n * (n + 1) // 2 for n in (200, 56, 250, 6))] * 2
    assert work[0].masked == work[1].masked == 0
    documents = torch.arange(256).repeat_interleave(2)[None]
    attend(make_tensor, 512, 512, q_documents=documents, k_documents=documents)
    assert work[0].masked == 512**2


LONG = 20_000
CASES = {
    "runs": {"q_order": torch.arange(LONG).roll(LONG // 2)},
    "scattered": {"q_order": torch.arange(LONG).flip(0)},
    "window": {"window": 100},
    "documents": {"q_documents": torch.zeros(1, LONG).long(), "k_documents": torch.zeros(1, 600).long()},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_no_mask_of_all_pairs_is_made(case, dtype, make_tensor):
    """Nothing as large as a byte for each pair; and no more is alive than results and the workspace that is said."""
    masks = {"q_order": None, "k_order": None, "q_documents": None, "k_documents": None, "window": None} | CASES[case]
    window = masks.pop("window")
    q, k, v = (make_tensor((1, n, 1, 2), dtype) for n in (LONG, 600, 600))
    params = {"causal": True, "window": window, "scale": 1.0, "soft_cap": None}
    operands = (q, k, v, *masks.values(), None)
    with Storages() as forward:
        out, lse = attention_p.impl(*operands, **params)
    operands_bwd = (*operands, out, lse, out, torch.ones_like(lse))
    with Storages() as backward:
        attention_p.bwd.impl(*operands_bwd, **params)
    assert max(forward.largest, backward.largest) < LONG * 600
    assert forward.peak <= attention_p.cost(*operands, **params).workspace + out.nbytes + lse.nbytes
    assert backward.peak <= attention_p.bwd.cost(*operands_bwd, **params).workspace + q.nbytes + k.nbytes + v.nbytes


def test_merges_have_a_fixed_order(make_tensor):
    """The same bits in two runs, in a dtype that rounds."""
    q, k, v = (make_tensor((1, n, 2, 8), torch.bfloat16) for n in (128, 512, 512))
    runs = [ops.attention(q, k, v, q_order=PARTS[1], k_order=GATHERED) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    expected, _ = formula(*(x.double() for x in (q, k, v)), visible(PARTS[1], GATHERED))
    testing.assert_close(runs[0][0], expected)
