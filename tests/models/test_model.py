"""The model as a function: packing, padding, weights, vocabulary padding, initialisation, errors of batches."""

import dataclasses

import pytest
import torch

from mpar import models, testing, tree
from mpar.errors import ConfigError, DataError, DtypeError, ShapeError
from mpar.models import _init
from mpar.models.decoder._embed import rounded
from mpar.models.layers import MoeConfig
from tests.models.variants import KINDS, VARIANTS

CONFIG = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def made(kind="qwen3", **options):
    """(model, params) in float64."""
    model = models.build(kind, {**CONFIG, **options}, dtype=torch.float64)
    return model, model.init(3)


def made_tiny(kind, **changes):
    """(model, params) in float64 of the tiny config that is compared with transformers."""
    model = models.build(kind, {**KINDS[kind].base, "initializer_range": 0.3, **changes}, dtype=torch.float64)
    return model, model.init(3)


def tokens_of(shape, seed=0, high=CONFIG["vocab_size"]):
    """Random ids."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_rows(kind):
    """Documents packed in one row, positions restarted by the data, give the logits of rows of their own; padding between and
    behind them is inert."""
    model, params = made_tiny(kind)
    sizes, padding, row = (5, 9, 4), 3, tokens_of((1, 27), high=61)
    documents = torch.tensor([[n for i, size in enumerate(sizes) for n in [i] * size + [-1] * padding]])
    positions = torch.tensor([[p for size in sizes for p in [*range(size), *[0] * padding]]])
    packed = model.apply(params, row, positions=positions, documents=documents)
    start = 0
    for size in sizes:
        alone = model.apply(params, row[:, start : start + size])
        testing.assert_close(packed[:, start : start + size], alone, name=f"document at {start}")
        start += size + padding
    seen = documents != -1
    other = row.where(seen, 0)
    again = model.apply(params, other, positions=positions, documents=documents)
    testing.assert_close(again[seen], packed[seen], name="with other padding")
    assert torch.isfinite(packed).all()


@pytest.mark.parametrize("variant", [name for name, (kind, _) in VARIANTS.items() if kind != "mamba2"])  # which goes by order
def test_permuted_rows_have_the_same_losses(variant):
    """With `order`, tokens may be stored in any order: each one's loss is what it was, windows, positions and all."""
    kind, changes = VARIANTS[variant]
    model, params = made_tiny(kind, **changes)
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(24, generator=generator)
    batch = {"tokens": tokens_of((2, 24), high=61), "labels": tokens_of((2, 24), 1, high=61)}
    batch["token_weights"] = torch.rand(2, 24, generator=generator)
    expected, _ = model.loss(params, batch)
    permuted = {key: value[:, order] for key, value in batch.items()}
    testing.assert_close(model.loss(params, {**permuted, "order": order})[0], expected, name="loss", rtol=1e-10)
    assert abs(model.loss(params, permuted)[0] / expected - 1) > 1e-6


STEPPING = [
    name for name, (kind, changes) in VARIANTS.items() if models.build(kind, {**KINDS[kind].base, **changes}).config.can_decode
]


@pytest.mark.parametrize("variant", STEPPING)
def test_steps_give_the_logits_of_the_whole(variant):
    """Pieces of a row from state to state give the logits of the row at once: windows, caps, sinks, rotations, positions."""
    kind, changes = VARIANTS[variant]
    model, params = made_tiny(kind, **changes)
    row, state, parts = tokens_of((2, 24), high=61), None, []
    for piece in row.split([9, 1, 1, 6, 1, 6], 1):
        logits, state = model.decode(params, piece, state)
        parts.append(logits)
    testing.assert_close(torch.cat(parts, 1), model.apply(params, row), rtol=1e-10)


def test_states_of_windows_do_not_grow():
    """A layer with a window keeps the keys that the next token sees; one without keeps all."""
    model, params = made_tiny("gemma3_text")
    _, (count, (local, full)) = model.decode(params, tokens_of((2, 12), high=61))
    assert count == 12
    assert local.k_BMKH.shape[1] == local.v_BMKH.shape[1] == 4  # with itself the next one sees 5
    assert local.order_M.tolist() == [8, 9, 10, 11]
    assert full.k_BMKH.shape[1] == 12


def test_rows_longer_than_learned_positions_are_refused():
    """GPT-2 takes rows of up to n_positions, and no longer ones, whose later tokens would silently have no position."""
    model, params = made_tiny("gpt2", n_positions=8)
    assert torch.isfinite(model.apply(params, tokens_of((1, 8), high=61))).all()
    with pytest.raises(ShapeError, match=r"rows of 9 tokens.*8 positions"):
        model.apply(params, tokens_of((1, 9), high=61))
    with pytest.raises(ShapeError, match="use shorter rows"):
        model.apply(params, tokens_of((1, 9), high=61), positions=torch.arange(9)[None])
    _, state = model.decode(params, tokens_of((1, 8), high=61))
    with pytest.raises(ShapeError, match="go on to 9 tokens"):
        model.decode(params, tokens_of((1, 1), high=61), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1.0, 32.0**0.5, 3072**0.5, 3584**0.5, 59.75, 0.1, 55.5])
def test_scales_are_rounded_as_the_dtype_does(value, dtype):
    """The scale of embeddings is the number that the dtype holds, ties to even."""
    assert rounded(value, dtype) == torch.tensor(value, dtype=torch.float64).to(dtype).item()


def test_side_losses_get_the_weight_of_the_batch():
    """context has `weight`, the batch's total, where a layer has losses of its own and the batch has labels; else not."""
    model, _ = made()
    batch = {"tokens": tokens_of((2, 7)), "labels": tokens_of((2, 7), 1), "token_weights": torch.rand(2, 7)}
    assert "weight" not in model.context(batch)
    layers = model.config.layers
    sparse = dataclasses.replace(layers[-1], mlp=MoeConfig(num_experts=4, top_k=2, mlp_size=8, aux_loss=0.1))
    config = dataclasses.replace(model.config, layers=(*layers[:-1], sparse))
    model = dataclasses.replace(model, config=config)
    testing.assert_close(model.context(batch)["weight"], batch["token_weights"].double().sum())
    assert "weight" not in model.context({"tokens": batch["tokens"]})


def test_window_limits_what_is_seen():
    """With windows of 4 in both of two layers, a token further back than 2 * 3 changes nothing; one within does."""
    model, params = made("qwen2", num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    row = tokens_of((1, 16))
    changed = row.clone()
    changed[0, 5] = (row[0, 5] + 1) % 150
    difference = (model.apply(params, row) - model.apply(params, changed)).abs().amax(-1)[0]
    assert (difference > 0).nonzero().flatten().tolist() == list(range(5, 12))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
def test_loss_is_the_weighted_sum_over_labels(tied, chunk):
    """The loss is sum of weight * nats over labels that are not -100, and padding columns of the vocabulary have no part."""
    model, params = made(tie_word_embeddings=tied)
    model = model.with_logits_chunk(chunk)
    batch = {"tokens": tokens_of((2, 7)), "labels": tokens_of((2, 7), 1), "token_weights": torch.rand(2, 7)}
    batch["labels"][0, 2:4] = -100
    loss, weight = model.loss(params, batch)
    nats = -model.apply(params, batch["tokens"]).log_softmax(-1)
    counted = batch["labels"] >= 0
    picked = nats.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    testing.assert_close(loss, (picked * batch["token_weights"].double())[counted].sum(), name="loss")
    testing.assert_close(weight, batch["token_weights"].double()[counted].sum(), name="weight")
    del batch["token_weights"]
    loss, weight = model.loss(params, batch)
    testing.assert_close(loss, picked[counted].sum(), name="loss")
    assert weight == 12


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
def test_padding_of_the_vocabulary_is_inert(tied, chunk):
    """The vocabulary is padded to 256; logits have 150 columns; garbage in padding changes no loss; its gradient is zero."""
    model, params = made(tie_word_embeddings=tied)
    model = model.with_logits_chunk(chunk)
    assert params.embed.table_VD.shape == (256, 32)
    batch = {"tokens": tokens_of((2, 7)), "labels": tokens_of((2, 7), 1)}
    assert model.apply(params, batch["tokens"]).shape == (2, 7, 150)
    dirty = tree.map_leaves(torch.clone, params)
    dirty.embed.table_VD[150:] = 50.0
    if not tied:
        dirty.head.head_DV[:, 150:] = 50.0
    assert torch.equal(model.loss(dirty, batch)[0], model.loss(params, batch)[0])
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    grads = torch.autograd.grad(model.loss(params, batch)[0], leaves)
    assert not grads[0][150:].any()
    assert tied or not grads[-1][:, 150:].any()


def test_equal_layers_are_one_function():
    """Layers with the same settings share one function object, and models made twice have equal ones."""
    model, again = made("qwen2")[0], made("qwen2")[0]
    functions = [segment.fn for segment in model.segments[1:-1]]
    assert all(fn is functions[0] for fn in functions)
    assert [hash(s.fn) for s in model.segments] == [hash(s.fn) for s in again.segments]
    assert model == again
    windows = models.build("qwen2", {**CONFIG, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2})
    assert len({segment.fn for segment in windows.segments}) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_axes_fit_the_parameters(variant):
    """Every leaf has one axis name per dim, at the same path."""
    kind, changes = VARIANTS[variant]
    model = models.build(kind, {**KINDS[kind].base, **changes})
    axes = tree.leaves_with_path(
        model.param_axes, is_leaf=lambda x: isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)
    )
    shapes = [(path, leaf.ndim) for path, leaf in tree.leaves_with_path(model.abstract_params)]
    assert [(path, len(names)) for path, names in axes] == shapes


def test_init_follows_the_config():
    """Matrices have the config's deviation and differ; gains are one, biases and padding zero; the seed matters."""
    model, params = made("qwen2", hidden_size=64, intermediate_size=96)
    block = params.layers[1]
    for weights in (block.attention.q_DNH, block.mlp.down_FD, params.embed.table_VD[:150], params.head.head_DV[:, :150]):
        assert abs(float(weights.std()) / 0.3 - 1) < 0.05
        assert abs(float(weights.mean())) < 0.03
    assert not params.embed.table_VD[150:].any()
    assert not params.head.head_DV[:, 150:].any()
    assert (block.attn_norm_D == 1).all()
    assert not block.attention.q_bias_NH.any()
    assert not torch.equal(block.mlp.gate_DF, block.mlp.up_DF)
    assert not torch.equal(block.mlp.gate_DF, params.layers[0].mlp.gate_DF)
    assert not torch.equal(block.mlp.gate_DF, model.init(4).layers[1].mlp.gate_DF)


def test_fresh_gains_are_one_with_their_offset():
    """Gemma stores what gains exceed one by: zero at first, in layers, heads and the head of the model."""
    params = made_tiny("gemma3_text")[1]
    gains = [leaf for path, leaf in tree.leaves_with_path(params) if "norm" in path]
    assert len(gains) == 2 * 6 + 1
    assert not any(gain.any() for gain in gains)


def test_biases_of_norms_start_at_zero():
    """Biases of layer norms are zero at first, their gains one."""
    block = made("starcoder2")[1].layers[0]
    assert (block.attn_norm_D == 1).all() and (block.mlp_norm_D == 1).all()
    assert not block.attn_norm_bias_D.any() and not block.mlp_norm_bias_D.any()


@pytest.mark.parametrize("path", ["embed.table_VD", "head.head_DV", "layers.1.attention.q_DNH", "layers.0.attention.q_bias_NH"])
def test_init_of_a_shard_is_part_of_the_whole(path):
    """`init_leaf` of slices is bit-equal to the slices of `init`, across the edge of the padding too."""
    model, params = made("qwen2")
    whole = tree.get(params, path)
    cut = tuple(slice(size // 4, 3 * size // 4) for size in whole.shape)
    assert torch.equal(model.init_leaf(3, path, cut), whole[cut])


def test_init_does_not_depend_on_padding_or_blocks(monkeypatch):
    """The same weights whatever multiple the vocabulary is padded to and however many elements are drawn at once."""
    monkeypatch.setattr(_init, "INIT_BLOCK", 1000)
    other = models.build("qwen3", {**CONFIG}, dtype=torch.float64, vocab_multiple=8)
    assert torch.equal(other.init(3).head.head_DV[:, :150], made()[1].head.head_DV[:, :150])


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"labels": tokens_of((2, 3))}, DataError, "needs tokens"),
        ({"tokens": tokens_of((2, 3)), "label": tokens_of((2, 3))}, DataError, "label"),
        ({"tokens": tokens_of((2, 3)), "labels": tokens_of((2, 4))}, ShapeError, r"labels.*\(2, 4\)"),
        ({"tokens": tokens_of((3,)), "labels": tokens_of((3,))}, ShapeError, r"\(B, S\)"),
        ({"tokens": torch.rand(2, 3), "labels": tokens_of((2, 3))}, DtypeError, "tokens"),
        ({"tokens": tokens_of((2, 3))}, DataError, "labels"),
    ],
)
def test_bad_batches_are_refused(batch, error, text):
    """Missing, unknown, misshapen or non-integer entries raise an error that names them."""
    model, params = made()
    with pytest.raises(error, match=text):
        model.loss(params, batch)


def test_integer_parameters_are_refused():
    """A dtype that is not floating raises ConfigError."""
    with pytest.raises(ConfigError, match="int32"):
        models.build("qwen3", CONFIG, dtype=torch.int32)
