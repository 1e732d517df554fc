"""Multi-token prediction against the layer of transformers, with its weights from a checkpoint; and in a step."""

import json

import pytest
import safetensors.torch
import torch
from transformers.modeling_layers import MtpModel

from mpar import models, testing, tree
from mpar.errors import CheckpointError, ConfigError, DataError
from mpar.mesh import Mesh
from mpar.optim import SGD
from mpar.program import State
from mpar.program.compile import compile_step
from tests.models.variants import KINDS

TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], 1)
BATCH = models.with_next_tokens({"tokens": TOKENS, "labels": LABELS})


def built(**options):
    """A small DeepSeek-V3 in float64 with one more layer."""
    config = {key: value for key, value in KINDS["deepseek_v3"].base.items() if value is not None}
    return models.build("deepseek_v3", config, dtype=torch.float64, mtp_loss_weight=0.3, **options)


def layer_of_transformers(reference):
    """(its further layer with drawn parameters, those under the names of checkpoints)."""
    further, generator = MtpModel(reference, 1).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in further.layers.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    stored = {}
    for name, value in further.layers[0].state_dict().items():
        name = f"model.layers.2.{name.replace('mtp_block.', '').replace('post_norm', 'shared_head.norm')}"
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value.clone()
            continue
        base, parts = name.rpartition(".")[0], {"down_proj": (value,)}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), value.chunk(2, 1), strict=True))
        for part, matrices in parts.items():
            matrices = matrices[0] if isinstance(matrices, tuple) else matrices
            stored |= {f"{base}.{e}.{part}.weight": matrix.clone() for e, matrix in enumerate(matrices)}
    return further, stored


@pytest.fixture
def pair(make_folder):
    """(folder of a checkpoint with the layer behind the last one, transformers' model, its further layer)."""
    folder, reference = make_folder("deepseek_v3")
    further, stored = layer_of_transformers(reference)
    file = folder / "model.safetensors"
    shared = {"model.layers.2.embed_tokens.weight": torch.zeros(61, 32)}  # a copy that published checkpoints have
    safetensors.torch.save_file({**safetensors.torch.load_file(file), **stored, **shared}, file, metadata={"format": "pt"})
    return folder, reference, further, stored


def test_loss_equals_transformers(pair):
    """The side loss is weight times the cross-entropy of transformers' further layer, from the checkpoint's weights."""
    folder, reference, further, _ = pair
    model, params = models.from_hf(folder, mtp_loss_weight=0.3)
    last = reference(TOKENS, output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(12)[None]
    hidden = further.forward_layer(0, last, positions, None, input_ids=BATCH["next_tokens"])
    logits = reference.lm_head(hidden)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["next_labels"].flatten(), reduction="sum")
    embed, *layers, segment, _ = model.segments
    context = model.context(BATCH)
    x, _ = embed.fn((params.embed,), None, context, training=True)
    for i, layer in enumerate(layers):
        x = layer.fn((params.layers[i],), x, context, training=True)[0]
    after, losses, metrics = segment.fn((params.mtp, params.embed, params.head), x, context, training=True)
    testing.assert_close(losses["mtp_loss"], 0.3 * expected, rtol=1e-5)
    assert torch.equal(after, x)
    assert int(metrics["expert_counts"].sum()) == TOKENS.numel() * 3


def test_import_then_export_is_bit_equal(pair, tmp_path):
    """The layer behind the last one is written as it was read; the copy of the embedding is not."""
    folder, _, _, stored = pair
    model, params = models.from_hf(folder, mtp_loss_weight=0.3)
    models.to_hf(model, params, tmp_path / "out")
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in stored.items())
    assert "model.layers.2.embed_tokens.weight" not in written
    assert set(stored) < set(written)


def test_a_folder_says_how_many_layers_it_has(pair, tmp_path):
    """config.json counts the layer that was written, or none; a folder without it is refused in one line where it is needed."""
    folder = pair[0]
    for name, options, count in (("with", {"mtp_loss_weight": 0.3}, 1), ("without", {}, 0)):
        models.to_hf(*models.from_hf(folder, **options), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"] == count
    with pytest.raises(CheckpointError) as caught:
        models.from_hf(tmp_path / "without", mtp_loss_weight=0.3)
    words = "missing: all of model.layers.2, the layer for further tokens; without mtp_loss_weight it is not needed"
    assert str(caught.value).splitlines()[1:] == [f"  {words}"]


def test_feed_forward_layers_in_tiles(pair):
    """With mlp_chunk the shared expert of the layer is in tiles, too, and the model gives the same."""
    model, params = models.from_hf(pair[0], dtype=torch.float64, mtp_loss_weight=0.3)
    tiled = model.with_mlp_chunk(3)
    assert tiled.config.multi_token.layer == tiled.config.layers[-1] != model.config.layers[-1]
    assert losses_of(tiled, params)["mtp_loss"] == pytest.approx(float(losses_of(model, params)["mtp_loss"]), rel=1e-12)


def losses_of(model, params):
    """Sums of losses over the tokens of BATCH, by name; those of one name added."""
    x, found, context = None, {}, model.context(BATCH)
    for segment in model.segments:
        x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
        found = {**found, **{name: found.get(name, 0) + value for name, value in losses.items()}}
    return found


def test_next_tokens_stay_in_their_document():
    """A position's next token and label are those one further, if that is in the same document; else 0 and -100."""
    tokens, labels = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[6, -100, 8, 9, -100]])
    batch = {"tokens": tokens, "labels": labels, "documents": torch.tensor([[0, 0, 1, 1, 1]])}
    further = models.with_next_tokens(batch)
    assert further["next_tokens"].tolist() == [[6, 0, 8, 9, 0]]
    assert further["next_labels"].tolist() == [[-100, -100, 9, -100, -100]]


def test_logits_do_not_need_the_layer():
    """The model's own logits are the same with and without it, in steps too."""
    model, plain = built(), models.build("deepseek_v3", built().hf_config, dtype=torch.float64)
    params = model.init(1)
    without = type(params)(params.embed, params.layers, params.head)
    expected = plain.apply(without, TOKENS)
    assert torch.equal(model.apply(params, TOKENS), expected)
    testing.assert_close(model.decode(params, TOKENS)[0], expected)


@pytest.mark.parametrize(
    ("mesh", "strategy"), [(Mesh(dp=2), "ddp"), (Mesh(fsdp=2, tp=2), "zero3_tp_sp"), (Mesh(pp=2), "ddp")], ids=str
)
def test_steps_equal_autograd(mesh, strategy):
    """A compiled step moves every parameter by the gradient of the loss with the side loss, on any mesh."""
    model = built(router={"bias_rate": 0.25})
    params, batch = model.init(1), {key: torch.cat([value, value.flip(0)]) for key, value in BATCH.items()}
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    x, total, context = None, 0, model.context(batch)
    for segment in model.segments:
        x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
        total = total + sum(losses.values())
    grads = torch.autograd.grad(total / model.weight(batch), leaves, materialize_grads=True)
    optimizer = SGD(lr=1.0, clip_norm=None)
    shapes = {key: (tuple(value.shape), value.dtype) for key, value in batch.items()}
    program = compile_step(model, optimizer, mesh, strategy, shapes)
    named = dict(tree.leaves_with_path(tree.map_leaves(torch.Tensor.detach, params)))
    slots = {f"opt.{slot}.{path}": torch.zeros_like(leaf) for slot in optimizer.slots for path, leaf in named.items()}
    state, metrics = program.simulate(State({f"params.{path}": x.clone() for path, x in named.items()} | slots), batch)
    assert "mtp_loss" in metrics
    for (path, leaf), grad in zip(named.items(), grads, strict=True):
        moved = leaf - state.leaves[f"params.{path}"]
        if path.endswith("choice_bias_E"):
            assert float(moved.abs().max()) == 0.25, path
        else:
            testing.assert_close(moved, grad, name=path, rtol=1e-9)


def test_what_does_not_fit_is_refused():
    """Weights that are not positive, models without such layers, batches without next tokens."""
    with pytest.raises(ConfigError, match=r"weight=0\.0: it must be positive"):
        models.build("deepseek_v3", built().hf_config, mtp_loss_weight=0.0)
    with pytest.raises(ConfigError, match=r"mtp_loss_weight=0\.1 asks for .* llama models do not have \(deepseek_v3 ones do\)"):
        models.build("llama", KINDS["llama"].base | {"pad_token_id": 0}, mtp_loss_weight=0.1)
    with pytest.raises(DataError, match=r"without \['next_tokens', 'next_labels'\]: models.with_next_tokens makes them"):
        built().context({"tokens": TOKENS, "labels": LABELS})


def test_flops_count_the_layer_and_the_second_head():
    """One more layer, the two matrices that join its inputs, and the head once more."""
    plain = models.build("deepseek_v3", built().hf_config)
    one = models.flops_per_token(built(), 0, causal=True) - models.flops_per_token(plain, 0, causal=True)
    layer = plain.abstract_params.layers[1]
    sizes = {path: leaf.numel() for path, leaf in tree.leaves_with_path(layer) if leaf.ndim > 1}
    active = sum(size * (3 / 8 if path.endswith(("EDF", "EFD")) else 1) for path, size in sizes.items())
    assert one == 6 * (active + 2 * 32 * 32 + 61 * 32)
