"""The object that stands for an adapted weight computes what the sum would, for every product and every view of it."""

import pytest
import torch
import torch.nn.functional as F

from mpar import adapters, models, ops, testing, tree
from mpar.adapters import Factor, LoRA, LowRank
from mpar.chain import context_of
from mpar.errors import ConfigError


def make(letters, a, b, sizes, **more):
    """A weight and the sum that it stands for."""
    generator = torch.Generator().manual_seed(0)

    def draw(names):
        return torch.randn([sizes[c] for c in names], generator=generator, dtype=torch.float64)

    gain = Factor(draw(more["gain"]), more["gain"]) if "gain" in more else None
    low = LowRank(draw(letters), letters, Factor(draw(a), a), Factor(draw(b), b), 0.5, gain)
    summed = low.base + 0.5 * torch.einsum(f"{a},{b}->{letters}", low.a.value, low.b.value)
    if gain is not None:
        summed = torch.einsum(f"{letters},{gain.letters}->{letters}", summed, gain.value)
    return low, summed


SIZES = {"d": 6, "n": 2, "h": 3, "e": 4, "R": 2}
WEIGHTS = {
    "columns": ("dnh", "dR", "Rnh", {}),
    "rows": ("nhd", "nhR", "Rd", {}),
    "with a gain": ("dnh", "dR", "Rnh", {"gain": "nh"}),
    "experts": ("edh", "edR", "eRh", {}),
}
VIEWS = {
    "transpose": lambda w: w.transpose(0, 2),
    "permute": lambda w: w.permute(1, 2, 0),
    "index": lambda w: w[1],
    "split": lambda w: w.split([1, w.shape[2] - 1], -1)[1],
    "chunk": lambda w: w.chunk(2, 0)[1],
    "unbind": lambda w: w.unbind(1)[0],
    "merge the last dims": lambda w: w.reshape(w.shape[0], -1),
    "merge the first dims": lambda w: w.flatten(0, 1),
    "divide": lambda w: w.unflatten(0, (2, -1)),
    "square": lambda w: w * w,
    "cat": lambda w: torch.cat([w, w]),
    "other dtype": lambda w: w.to(torch.float32),
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("view", VIEWS)
def test_views(weight, view):
    """A view, pushed to the factors or not, is that of the sum."""
    low, summed = make(*WEIGHTS[weight][:3], SIZES, **WEIGHTS[weight][3])
    seen = VIEWS[view](low)
    made = seen.tensor() if isinstance(seen, LowRank) else seen
    testing.assert_close(made, VIEWS[view](summed), name=view)
    pushed = view not in ("square", "cat", "other dtype") and not (
        view.startswith("merge") and {"columns": "first", "rows": "last", "with a gain": "first", "experts": "e"}[weight] in view
    )
    assert isinstance(seen, LowRank) == pushed


PRODUCTS = {
    "einsum of columns": ("dnh", "dR", "Rnh", lambda x, w: ops.einsum("bsd,dnh->bsnh", x, w), (2, 5, 6)),
    "einsum of rows": ("nhd", "nhR", "Rd", lambda x, w: ops.einsum("bsnh,nhd->bsd", x, w), (2, 5, 2, 3)),
    "from the other side": ("ed", "eR", "Rd", lambda x, w: ops.einsum("bsd,ed->bse", x, w), (2, 5, 6)),
    "linear": ("ed", "Rd", "eR", lambda x, w: F.linear(x, w, torch.ones(4, dtype=x.dtype)), (2, 5, 6)),
    "matmul": ("de", "dR", "Re", lambda x, w: x @ w, (2, 5, 6)),
    "torch.einsum": ("de", "dR", "Re", lambda x, w: torch.einsum("bsd,de->bse", x, w), (2, 5, 6)),
    "experts": ("edh", "edR", "eRh", lambda x, w: ops.grouped_matmul(x, w, torch.tensor([1, 3, 3, 5])), (5, 6)),
    "padded experts": ("edh", "edR", "eRh", lambda x, w: ops.einsum("egd,edh->egh", x, w), (4, 5, 6)),
    "embedding": ("ed", "eR", "Rd", lambda x, w: ops.embedding((x.abs() * 2).long() % 4, w), (2, 5)),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("gain", [False, True], ids=["", "gain"])
def test_products(product, gain):
    """A product, and the gradients of x and of the factors, are those of the sum."""
    letters, a, b, apply, shape = PRODUCTS[product]
    result = "".join(c for c in letters if c not in a)
    low, _ = make(letters, a, b, SIZES, **({"gain": result} if gain else {}))
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    leaves = [low.a.value.requires_grad_(), low.b.value.requires_grad_()] + ([x] if product != "embedding" else [])
    y, expected = apply(x, low), apply(x, low.tensor())
    testing.assert_close(y, expected, name="y")
    dy = torch.randn_like(y)
    for mine, theirs in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        testing.assert_close(mine, theirs, name="gradient")


def test_a_task_drops_what_the_output_matrix_reads():
    """The losses of single tokens add up to the loss of the segment, whose adapter drops; without numbers nothing is dropped."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    sizes |= {"max_position_embeddings": 64}
    plain = models.build("llama", {**sizes, "tie_word_embeddings": False}).with_dtype(torch.float64)
    model = adapters.add(plain, LoRA(rank=4, targets=("lm_head",), dropout=0.5, init="random"))
    params, head = adapters.first_params(model, plain.init(0), 0), model.segments[-1]
    rows = {key: torch.arange(24).reshape(2, 12) for key in ("tokens", "labels")}
    context = context_of("head", model.context(models.with_draws(rows, seed=0, step=1, rows=range(2), num_rows=2)))
    subtrees, x = tuple(tree.get(params, path) for path in head.paths), torch.randn(2, 12, 16, dtype=torch.float64)
    loss = head.fn(subtrees, x, context, training=True)[1]["loss"]
    testing.assert_close(head.fn.token_losses(subtrees, x, context).sum(), loss, rtol=1e-12)
    kept = {key: value for key, value in context.items() if key != models.DRAW}
    evaluated = head.fn(subtrees, x, kept, training=False)[1]["loss"]
    testing.assert_close(head.fn.token_losses(subtrees, x, kept).sum(), evaluated, rtol=1e-12)
    assert (loss - evaluated).abs() > 1e-3


def test_dropout_needs_a_product():
    """What A reads cannot be dropped where the weight itself is needed."""
    low, _ = make("de", "dR", "Re", SIZES)
    dropped = LowRank(low.base, low.letters, low.a, low.b, 1.0, drop=lambda x: x * 0)
    torch.testing.assert_close(
        torch.ones(1, 2, 6, dtype=torch.float64) @ dropped, torch.ones(1, 2, 6, dtype=torch.float64) @ low.base
    )
    with pytest.raises(ConfigError, match="cannot drop what an adapter of a weight"):
        dropped.tensor()
