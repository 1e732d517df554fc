"""Models of transformers without a declaration: what they compute, how they are sharded, what is refused."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import transformers

import mpar
from mpar import models, ops, testing, tree
from mpar.errors import ConfigError, UnknownNameError
from mpar.infer.compile import generate
from mpar.models import traced
from mpar.models.traced import _attention, _find_traits, _mode, _runs, _self_check
from mpar.models.traced._skeleton import Source
from mpar.models.traced._traits import Traits
from mpar.optim import SGD
from mpar.strategy import preset
from tests.models.traced_kinds import EXACT, REFUSED

SMALL = json.dumps({"model_type": "stablelm", **EXACT["stablelm"]})


def eager_of(kind):
    """transformers' own model of a tiny config, in float64."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **EXACT[kind])
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    eager = transformers.AutoModelForCausalLM.from_config(config, **how).eval().double()
    for parameter in eager.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return eager


def params_of(model, eager):
    """The parameters of `eager` as the leaves of `model`."""
    return model.leaves({name: x.detach() for name, x in eager.state_dict().items()})


@functools.cache
def model_of(kind):
    """The model that `models.from_config` makes."""
    return models.from_config({"model_type": kind, **EXACT[kind]}, dtype=torch.float64)


MESHES = [(mpar.Mesh(fsdp=2, tp=2), "zero3_tp_sp"), (mpar.Mesh(pp=2), "ddp"), (mpar.Mesh(cp=2), "ddp")]


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_logits_and_gradients_on_every_mesh(kind):
    """A step of plain gradient descent gives the gradients of transformers, whatever the mesh."""
    model, eager = model_of(kind), eager_of(kind)
    assert isinstance(model, traced.TracedModel)
    params = params_of(model, eager)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, 128, (2, 4, 12), generator=generator)
    theirs = eager(tokens, use_cache=False).logits
    torch.testing.assert_close(model.apply(params, tokens), theirs, rtol=1e-5, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    loss.backward()
    loss = loss.detach()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in eager.state_dict(keep_vars=True).items()}
    expected = dict(tree.leaves_with_path(model.leaves(gradients)))
    largest = max(float(x.abs().max()) for x in expected.values())
    for mesh, strategy in MESHES:
        optimizer = SGD(lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=1e9)
        program = mpar.compile_step(model, optimizer, mesh, strategy, (4, 12))
        after, metrics = program.simulate(program.init_state(params), {"tokens": tokens, "labels": labels})
        assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-6)
        new = dict(tree.leaves_with_path(after.params(model.abstract_params)))
        for path, old in tree.leaves_with_path(params):
            given, wanted = old - new[path], expected[path]
            bound = 1e-4 * max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((given - wanted).abs().max()) <= bound, (mesh, path)


@pytest.mark.parametrize(("kind", "count"), [("stablelm", 2), ("gpt_neox", 2), ("granite", 2), ("exaone4", 2)])
def test_messages_of_a_layer_are_those_of_megatron(kind, count):
    """Two all-reduces in the forward of a layer over tp=2."""
    program = mpar.compile_step(model_of(kind), SGD(lr=1.0), mpar.Mesh(tp=2), "tp", (4, 12))
    counts = [len(found.collectives) for name, found in program.kinds.items() if "layers" in name and "forward" in name]
    assert set(counts) == {count}


def test_heads_and_hidden_features_are_found():
    """The axes of the leaves: a matrix of four heads of 16 rows has a dim for heads."""
    axes = dict(tree.leaves_with_path(model_of("granite").param_axes, is_leaf=lambda x: isinstance(x, tuple)))
    shapes = dict(tree.leaves_with_path(model_of("granite").abstract_params))
    layer = "model.layers.1."
    assert axes[f"{layer}self_attn.q_proj.weight"] == ("heads", None, "embed")
    assert tuple(shapes[f"{layer}self_attn.k_proj.weight"].shape) == (2, 16, 64)
    assert axes[f"{layer}self_attn.k_proj.weight"] == ("kv_heads", None, "embed")
    assert axes[f"{layer}self_attn.o_proj.weight"] == ("embed", "heads", None)
    assert axes[f"{layer}mlp.up_proj.weight"] == ("mlp", "embed") and axes[f"{layer}mlp.down_proj.weight"] == ("embed", "mlp")
    assert axes["model.embed_tokens.weight"] == ("vocab", "embed")


def test_equal_layers_are_compiled_once():
    """Equal layers have one function; those that differ in their window do not."""
    assert traced.imported(Source(SMALL)).kinds == (0, 0)
    assert traced.imported(Source(json.dumps({"model_type": "exaone4", **EXACT["exaone4"]}))).kinds == (0, 1)


@pytest.mark.parametrize(("kind", "words"), [("stablelm", "StableLmForCausalLM"), ("olmoe", "OlmoeForCausalLM")])
def test_a_folder_comes_back_bit_by_bit(kind, words, tmp_path):
    """Read, written, and read by transformers: every tensor has its bits, and its name; of olmoe each expert has a tensor."""
    eager = eager_of(kind).float()
    eager.save_pretrained(tmp_path / "in")
    model, params = models.from_hf(tmp_path / "in")
    models.to_hf(model, params, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = eager.state_dict()
    assert set(again.state_dict()) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [words]


def loss_and_params(kind, mesh, strategy, **how):
    """The loss of a step, and the parameters after it."""
    model = model_of(kind)
    program = mpar.compile_step(model, SGD(lr=1.0), mesh, strategy, (4, 12), **how)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, 128, (2, 4, 12), generator=generator)
    state = program.init_state(model.init(seed=0))
    after, metrics = program.simulate(state, {"tokens": tokens, "labels": labels})
    return metrics["loss"], tree.leaves(after.params(model.abstract_params))


@pytest.mark.parametrize(
    ("kind", "mesh", "strategy", "how"),
    [
        ("exaone4", mpar.Mesh(), preset("ddp"), {"num_slices": 3}),
        ("olmoe", mpar.Mesh(fsdp=2), replace(preset("zero3"), expert_parallel=2), {}),
    ],
)
def test_slices_and_experts_on_ranks_change_nothing(kind, mesh, strategy, how):
    """Rows in slices, with a window shorter than a slice and a whole row; and experts that are spread over ranks."""
    loss, params = loss_and_params(kind, mesh, strategy, **how)
    expected_loss, expected = loss_and_params(kind, mpar.Mesh(), preset("ddp"))
    testing.assert_close(loss, expected_loss, name="loss")
    for given, wanted in zip(params, expected, strict=True):
        testing.assert_close(given, wanted, name="parameter")


@pytest.mark.parametrize("kind", ["exaone4", "gpt_neox"])
def test_tokens_through_a_cache_are_those_without(kind):
    """Greedy tokens; the logits of transformers choose the same."""
    model, eager = model_of(kind), eager_of(kind)
    prompt = torch.randint(3, 128, (2, 4), generator=torch.Generator().manual_seed(2))
    assert model.can_decode
    ours, theirs = generate(model, params_of(model, eager), prompt, 8), prompt
    with torch.no_grad():
        for _ in range(8):
            theirs = torch.cat([theirs, eager(theirs, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours, theirs)


def test_what_rows_allow_is_found_by_trying(monkeypatch, unchecked):
    """A layer that adds up earlier positions would be wrong in slices, in packed rows, and in another order."""
    assert traced.check_traced(SMALL) == Traits()
    layer = _runs.layer

    def mixing(skeleton, index, weights, x, *rest):
        return layer(skeleton, index, weights, x, *rest) + 0.01 * x.cumsum(1)

    model = traced.TracedModel(SMALL)
    params = model.init(seed=0)
    tokens = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(_runs, "layer", mixing)

    def logits(tokens):
        return model.apply(params, tokens)

    found = _find_traits.find_traits(model, params, logits, tokens)
    assert not (found.permutable or found.documents or found.continues)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_models_that_cannot_be_traced_are_refused(kind):
    """With the reason."""
    config, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=words):
        models.from_config({"model_type": kind, **config})


@pytest.fixture
def unchecked():
    """Forget what was checked and traced, before and after."""
    caches = (_self_check.check_traced, traced.imported)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _no_mask(monkeypatch):
    def unmasked(q, own, past, *, sinks_N, **how):
        return ops.attention(q, own.k_BMKH, own.v_BMKH, causal=False, sinks=sinks_N, **how)[0]

    monkeypatch.setattr(_attention.ops, "attention_parts", unmasked)


def _swapped_gate(monkeypatch):
    swiglu = ops.swiglu
    monkeypatch.setattr(_mode.ops, "swiglu", lambda gate, up: swiglu(up, gate))


def _untied_head(monkeypatch):
    head = _runs.head

    def untied(skeleton, weights, *rest):
        cut = {name: _mode.Weight([x.detach() for x in w.parts], w.axes, w.joined) for name, w in weights.items()}
        return head(skeleton, cut, *rest)

    monkeypatch.setattr(_runs, "head", untied)


def _detached_values(monkeypatch):
    attention = ops.attention_parts

    def detached(q, own, past, **how):
        return attention(q, own._replace(v_BMKH=own.v_BMKH.detach()), past, **how)

    monkeypatch.setattr(_attention.ops, "attention_parts", detached)


@pytest.mark.parametrize(
    ("plant", "words"),
    [(_swapped_gate, "logits differ"), (_untied_head, "gradient of lm_head.weight differs")],
)
def test_planted_errors_are_found(plant, words, monkeypatch, unchecked):
    """A self-check that could not fail would be worth nothing."""
    plant(monkeypatch)
    with pytest.raises(ConfigError, match=words):
        traced.check_traced(SMALL)


@pytest.mark.parametrize("plant", [_no_mask, _detached_values])
def test_attention_that_is_wrong_is_not_used(plant, monkeypatch, unchecked):
    """Errors planted in the primitive's place are found, in a value or a gradient: the model keeps its own attention."""
    assert traced.check_traced(SMALL).attention != "eager"
    traced.check_traced.cache_clear()
    plant(monkeypatch)
    assert traced.check_traced(SMALL).attention == "eager"


def test_what_a_traced_model_cannot_have_is_refused():
    """Options of declared models, and types that nobody knows."""
    with pytest.raises(ConfigError, match="it is traced, and has only what transformers has"):
        models.from_config({"model_type": "stablelm", **EXACT["stablelm"]}, mlp_chunk=8)
    with pytest.raises(UnknownNameError, match="known ones"):
        models.from_config({"model_type": "no_such_type"})
    with pytest.raises(ConfigError, match="cannot go on from a state"):
        traced.TracedModel(SMALL, traits=Traits(continues=False)).decode({}, torch.zeros(1, 1, dtype=torch.int64))


def test_fresh_parameters_and_flops():
    """Piecewise as whole; a weight counts six FLOPs a token."""
    model = models.from_config({"model_type": "stablelm", **EXACT["stablelm"]})
    params, path = model.init(seed=3), "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(model.init_leaf(3, path, (slice(2, 5), slice(None))), tree.get(params, path)[2:5])
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 128 * 64
    assert models.flops_per_token(model, 10, causal=False) == 6 * matrices + 6 * 10 * 2 * 2 * 64
