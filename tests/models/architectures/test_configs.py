"""Config keys: used, ignored with a reason, or refused by name."""

import pytest
import transformers

from mpar import models
from mpar.errors import ConfigError, UnknownNameError
from mpar.models.architectures import ARCHITECTURES
from mpar.models.architectures.keys import IGNORED_KEYS
from tests.models.variants import BASE, GPT2, KINDS

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_writes_is_known(kind):
    """The fullest config that transformers can write has no key that is unknown here."""
    config = KINDS[kind].make_config().to_dict()
    config["architectures"] = [KINDS[kind].model]
    assert models.from_config(config).name == kind


def test_every_ignored_key_has_a_reason():
    """The table of ignored keys says why, and names no key that an architecture reads."""
    for architecture in models.ARCHITECTURES.values():
        ignored = {**IGNORED_KEYS, **architecture.ignored}
        assert all(len(reason) > 10 for reason in ignored.values())
        assert not set(ignored) & set(architecture.keys)


def test_unknown_keys_are_listed_with_the_way_out():
    """All unknown keys are in one error, which offers `ignore`; with it the model is built."""
    config = {**BASE, "rope_interleved": True, "qk_clip": 3.0}
    with pytest.raises(ConfigError) as error:
        models.build("llama", config)
    assert "qk_clip=3.0" in str(error.value)
    assert "rope_interleved=True" in str(error.value)
    assert "ignore=('qk_clip', 'rope_interleved',)" in str(error.value)
    models.build("llama", config, ignore=("qk_clip", "rope_interleved"))


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama", {"hidden_act": "relu"}, r"hidden_act='relu': only 'silu', 'gelu', 'gelu_pytorch_tanh' are"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"use_sliding_window": False}, "unknown keys: use_sliding_window"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ("llama", {"hidden_size": None}, "hidden_size=None"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size=32 is not a multiple"),
        ("llama", {"head_dim": 7}, "head_dim=7 is odd"),
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "'mrope'.*default, linear, dynamic, yarn, longrope, llama3"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "rope_parameters.beta_fast=1"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters.factor='2'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta=-1.0"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ("llama", {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta=1.0.*rope_theta=2.0"),
        ("llama", {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, "disagree.*factor"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window=False"),
        ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention'"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ("qwen2", {"attention_bias": False}, "unknown keys: attention_bias"),
        ("starcoder2", {"rms_norm_eps": 1e-5}, "unknown keys: rms_norm_eps"),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.2}, "residual_dropout=0.1.*embedding_dropout=0.2"),
        ("starcoder2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm': only 'layer_norm' is"),
        ("starcoder2", {"sliding_window": 0}, "sliding_window=0"),
        ("starcoder2", {"num_key_value_heads": None}, "num_key_value_heads=None"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_parameters.long_factor is missing",
        ),
        ("llama", {"rope_parameters": {**LONG, "long_factor": [1.0, 2.0]}}, "long_factor has 2 entries, but there are 4 pairs"),
        ("llama", {"rope_parameters": {**LONG, "short_factor": [1.0, 2.0, 3.0, "4"]}}, "short_factor=.*list of positive numbers"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: only 1.0 is"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor=1.5: must be a number in \(0, 1\]"),
        ("phi3", {"partial_rotary_factor": 0.4}, "head_dim=3 is odd"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries"),
        ("gemma2", {"sliding_window": None}, "layer_types has sliding layers, but sliding_window=None"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_type='default': there are full_attention and"),
        (
            "gemma3_text",
            {"rope_local_base_freq": 3.0, "rope_parameters": {"sliding_attention": {"rope_theta": 2.0}}},
            "=3.0.*=2.0",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "unknown keys: clip_qkv"),
    ],
)
def test_values_that_are_not_implemented_are_refused_by_name(kind, change, text):
    """Each value outside what is implemented raises ConfigError with the key, the value and what would do."""
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        models.build(kind, {**BASE, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_embd": 30}, "n_embd=30 is not a multiple of n_head=4"),
        ({"hidden_size": 32}, "unknown keys: hidden_size"),
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"n_layer": 0}, "n_layer=0"),
    ],
)
def test_values_are_refused_in_the_words_of_the_config(change, text):
    """A config with its own words for sizes is refused in those."""
    with pytest.raises(ConfigError, match=text):
        models.build("gpt2", {**GPT2, **change})


MAY_BE_NEGATIVE = {
    "first_k_dense_replace": "layers from this number on have experts: all of them",
    "max_window_layers": "layers from this number on have windows: all of them",
    "sliding_window": "not looked at, unless use_sliding_window says so",
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_size_is_negative(kind):
    """A number of something that is less than none is refused by the name of its key, for every key that takes whole numbers."""
    sizes = [name for name, key in ARCHITECTURES[kind].keys.items() if key.kind == (int,)]
    assert len(sizes) > 4
    for name in sizes:
        try:
            models.build(kind, {**KINDS[kind].base, name: -4})
        except ConfigError as error:
            assert f"{name}=-4" in str(error), error
        else:
            assert name in MAY_BE_NEGATIVE, name


def test_chunked_loss_is_refused_for_capped_logits():
    """The loss from chunks of tokens does not bound logits: asking for both is an error, and not another function."""
    model = models.build("gemma2", {**BASE, "head_dim": 8})
    with pytest.raises(ConfigError, match=r"(?s)logits_chunk=8.*soft cap 30.0.*logits_chunk=None"):
        model.with_logits_chunk(8)
    with pytest.raises(ConfigError, match="logits_chunk=4"):
        models.build("gemma2", {**BASE, "head_dim": 8}, logits_chunk=4)


def test_all_problems_are_in_one_error():
    """Missing keys, unknown ones and bad values come together."""
    config = {key: value for key, value in BASE.items() if key != "vocab_size"} | {"pretraining_tp": 4, "nonsense": 1}
    with pytest.raises(ConfigError, match=r"(?s)nonsense=1.*vocab_size is missing.*pretraining_tp=4"):
        models.build("llama", config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "windmill"},
        {},
        {"model_type": ["llama"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    ],
)
def test_unknown_architectures_are_refused_with_the_known_ones(config):
    """The error lists what can be built."""
    with pytest.raises(UnknownNameError, match=r"llama \(LlamaForCausalLM\), .*qwen2 \(Qwen2ForCausalLM\), .*qwen3"):
        models.from_config({**BASE, **config})


def test_build_refuses_a_config_of_another_type():
    """The name and the config's model_type must agree."""
    with pytest.raises(ConfigError, match=r"qwen3.*llama"):
        models.build("qwen3", {**BASE, "model_type": "llama"})


@pytest.mark.parametrize(("option", "value"), [("vocab_multiple", 0), ("logits_chunk", -1)])
def test_bad_options_are_refused(option, value):
    """Paddings and chunks are positive."""
    with pytest.raises(ConfigError, match=option):
        models.build("llama", BASE, **{option: value})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_null_and_missing_sizes_mean_what_transformers_makes_of_them(kind):
    """No key and value heads: as many as query heads; no head_dim: hidden_size / heads, or 128 for Qwen3."""
    config = {**BASE, "num_key_value_heads": None}
    reference = getattr(transformers, KINDS[kind].config)(**config)
    ours = models.build(kind, config).config.layers[0].mixer
    assert ours.num_kv_heads == reference.num_key_value_heads == 4
    assert ours.head_size == getattr(reference, "head_dim", 32 // 4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gemma2", {}), ("gemma3_text", {"layer_types": None}), ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3})],
)
def test_patterns_of_windows_are_those_of_transformers(kind, changes):
    """A config that does not list the kinds of its layers means the list that transformers makes."""
    changes = {**changes, "num_hidden_layers": 7}
    reference, ours = KINDS[kind].make_config(**changes), models.build(kind, {**KINDS[kind].base, **changes}).config
    windows = [{"sliding_attention": 5, "full_attention": None}[kind] for kind in reference.layer_types]
    assert [layer.mixer.window for layer in ours.layers] == windows
    assert len(set(windows)) == 2


def test_rotations_of_gemma3_have_the_defaults_of_transformers():
    """Without a word on RoPE, layers with windows have one theta, those without another."""
    ours = models.build("gemma3_text", KINDS["gemma3_text"].base).config
    reference = KINDS["gemma3_text"].make_config().rope_parameters
    thetas = {name: rope.theta for name, rope in ours.ropes}
    assert thetas["main"] == reference["full_attention"]["rope_theta"]
    assert thetas["local"] == reference["sliding_attention"]["rope_theta"]
    assert [layer.mixer.rope for layer in ours.layers] == ["local", "main"]


def test_defaults_of_starcoder2_are_those_of_transformers():
    """What a config leaves out is what transformers fills in, from the key and value heads to the tied embedding."""
    given = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    reference, ours = transformers.Starcoder2Config(**given), models.build("starcoder2", given).config
    layer = ours.layers[0]
    assert (layer.mixer.num_kv_heads, layer.mlp.activation) == (reference.num_key_value_heads, reference.hidden_act)
    assert (layer.norm.eps, ours.initializer_range) == (reference.norm_epsilon, reference.initializer_range)
    assert (ours.tied, layer.mixer.qkv_bias, layer.mixer.window) == (reference.tie_word_embeddings, reference.use_bias, None)
