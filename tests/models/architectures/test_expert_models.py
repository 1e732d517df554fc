"""Models with experts: router logits and generation beside transformers, config keys, options of routers, what is counted."""

import json
import math

import pytest
import safetensors.torch
import torch
import transformers
import yaml

from mpar import models, testing, tree
from mpar.conf_dir import conf_dir
from mpar.errors import CheckpointError, ConfigError, UnknownNameError
from mpar.infer.compile import generate
from mpar.mesh import Mesh
from mpar.models.layers.moe import MoeConfig, _moe
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from tests.models.variants import KINDS, VARIANTS

SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
CONF = conf_dir() / "model"


def built(kind, router=None, **changes):
    """The model of a kind's tiny config."""
    return models.build(kind, {k: v for k, v in {**KINDS[kind].base, **changes}.items() if v is not None}, router=router)


def experts_of(model):
    """The configs of its layers of experts."""
    return [layer.mlp for layer in model.config.layers if isinstance(layer.mlp, MoeConfig)]


@pytest.mark.parametrize("variant", [name for name, (kind, _) in VARIANTS.items() if kind in SPARSE])
def test_router_logits_equal_transformers(variant, make_folder, monkeypatch):
    """The logits of every router agree to 1e-5."""
    kind, changes = VARIANTS[variant]
    folder, reference = make_folder(kind, **changes)
    model, params = models.from_hf(folder)
    found, plain = [], _moe.router_logits
    monkeypatch.setattr(_moe, "router_logits", lambda params, x: found.append(plain(params, x)) or found[-1])
    model.apply(params, TOKENS)
    expected = []
    for name, module in reference.named_modules():
        if name.endswith(("mlp.gate", "mlp.router", "block_sparse_moe.gate")):
            module.register_forward_hook(lambda module, inputs, outputs: expected.append(outputs[0]))
    reference(TOKENS)
    assert len(found) == len(expected) == len(experts_of(model))
    for layer, (logits, wanted) in enumerate(zip(found, expected, strict=True)):
        testing.assert_close(logits.flatten(0, 1), wanted, name=f"router {layer}", rtol=1e-5)


@pytest.mark.parametrize("kind", SPARSE)
def test_greedy_generation_equals_transformers(kind, make_folder):
    """Twelve tokens, each the likeliest after those before it, are the same."""
    folder, reference = make_folder(kind)
    model, params = models.from_hf(folder)
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones_like(TOKENS)  # else it hides the tokens that equal the padding
    expected = reference.generate(TOKENS, **settings)
    assert torch.equal(generate(model, params, TOKENS, 12), expected)


@pytest.mark.parametrize("kind", SPARSE)
def test_sequential_experts_are_the_same_model(kind):
    """The reference that computes every expert on every token gives the same logits."""
    model, sequential = built(kind), built(kind, router={"grouped": False})
    params = model.init(1)
    testing.assert_close(sequential.apply(params, TOKENS), model.apply(params, TOKENS), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: only 0 is"),
        ("mixtral", {"num_experts": 3}, "'num_experts': 3, 'num_local_experts': 4} disagree"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k=5 is more than num_experts=4"),
        ("qwen2_moe", {"mlp_only_layers": [0, 2]}, r"mlp_only_layers has \[2\]; there are layers 0 to 1"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be a positive int"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 2}, "unknown keys: layer_types"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True: only False is"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': only 'greedy', 'group_limited_greedy' are"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads=2: latent attention has as many as"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid' is"),
        ("deepseek_v3", {"n_group": 3}, "groups=3 does not divide num_experts=8"),
        ("deepseek_v3", {"topk_group": 1}, "1 of 4 groups of 2 experts do not hold top_k=3"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: only 1 is"),
        ("deepseek_v3", {"qk_head_dim": 12}, r"qk_head_dim=12 is not qk_nope_head_dim \+ qk_rope_head_dim = 10"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "is odd; RoPE turns pairs"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "unknown keys: quantization_config"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window=0"),
    ],
    ids=str,
)
def test_values_that_are_not_implemented_are_refused_by_name(kind, changes, text):
    """Each value outside what is implemented raises ConfigError with the key or field, the value and what would do."""
    with pytest.raises(ConfigError, match=text):
        built(kind, **changes)


def test_published_keys_are_known():
    """Configs as they were released, with the words of their time, build the layers that they describe."""
    deepseek = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    }
    mixer = built("deepseek_v3", **deepseek).config.layers[0].mixer
    assert math.isclose(mixer.scale, 10**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    window = built("qwen3_moe", max_window_layers=2, sliding_window=5, use_sliding_window=False).config.layers[0].mixer.window
    assert window is None
    assert built("gpt_oss", experts_per_token=2, initial_context_length=4096).config == built("gpt_oss").config


@pytest.mark.parametrize("kind", SPARSE)
def test_defaults_are_those_of_transformers(kind):
    """What a config leaves out is what transformers fills in: theta of the rotation, experts, windows."""
    given = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    given |= {"max_position_embeddings": 131_072, "head_dim": 16, "num_key_value_heads": 4}
    given |= {"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}  # transformers has none for it
    if kind.startswith("deepseek"):
        given.pop("head_dim")
    written = getattr(transformers, KINDS[kind].config)(**given).to_dict()
    written["architectures"] = [KINDS[kind].model]
    assert models.build(kind, given).config == models.from_config(written).config


def test_windows_that_are_not_listed_alternate():
    """Without layer_types Qwen2-MoE slides in every other layer below max_window_layers, as in transformers."""
    given = {**KINDS["qwen2_moe"].base, "num_hidden_layers": 6, "max_window_layers": 4, "use_sliding_window": True}
    kinds = transformers.Qwen2MoeConfig(**given, sliding_window=5).layer_types
    layers = built("qwen2_moe", **given, sliding_window=5).config.layers
    assert [layer.mixer.window for layer in layers] == [5 if kind == "sliding_attention" else None for kind in kinds]


def test_router_options_reach_every_layer_of_experts():
    """Options set the fields of all routers, in layers with experts alone; the dense first layer stays."""
    options = {"capacity_factor": 1.5, "z_loss": 1e-3, "bias_rate": 1e-3, "seq_aux_loss": 1e-4}
    model = built("deepseek_v3", router=options, num_hidden_layers=3)
    assert len(experts_of(model)) == 2
    for experts in experts_of(model):
        assert {name: getattr(experts, name) for name in options} == options
    assert model.config.layers[0] == built("deepseek_v3").config.layers[0]


def test_the_loss_of_transformers_is_on_where_it_puts_router_logits_out():
    """router_aux_loss_coef counts with output_router_logits, as in transformers; an option overrides it."""
    settings = {"router_aux_loss_coef": 0.02}
    assert experts_of(built("mixtral", **settings))[0].aux_loss == 0
    assert experts_of(built("mixtral", **settings, output_router_logits=True))[0].aux_loss == 0.02
    assert experts_of(built("mixtral", **settings, output_router_logits=True, router={"aux_loss": 0.1}))[0].aux_loss == 0.1


@pytest.mark.parametrize(
    ("kind", "router", "error", "text"),
    [
        ("qwen3_moe", {"capacity": 1.0, "drop": True}, UnknownNameError, r"\['capacity', 'drop'\]: there are aux_loss"),
        ("qwen3_moe", {"bias_rate": 1e-3}, ConfigError, "bias_rate=0.001 moves a bias of the choice, which this model does not"),
        ("deepseek_v3", {"kind": "sinkhorn"}, ConfigError, "kind='sinkhorn' does not use the bias"),
        ("qwen3", {"z_loss": 1e-3}, ConfigError, "router={'z_loss': 0.001} is for layers of experts, and this model has none"),
    ],
)
def test_router_options_that_do_not_fit_are_refused(kind, router, error, text):
    """Unknown options, options of another router, and options for a model without experts raise an error."""
    with pytest.raises(error, match=text):
        built(kind, router=router)


def test_only_active_experts_are_counted():
    """FLOPs per token count the router, top_k of the experts, the shared layer, and latent attention with its head sizes."""
    model = built("deepseek_v3", num_hidden_layers=2)
    D, heads, q_rank, kv_rank, nope, rope, v = 32, 4, 10, 12, 6, 4, 5
    attention = D * q_rank + q_rank * heads * (nope + rope) + D * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * D
    experts = D * 8 + (3 + 1) * 3 * D * 16
    weights = 2 * attention + 3 * D * 40 + experts + 61 * D
    assert models.flops_per_token(model, 0, causal=False) == 6 * weights
    pairs = models.flops_per_token(model, 100, causal=False) - 6 * weights
    assert pairs == 6 * 100 * 2 * heads * (nope + rope + v)


PUBLISHED = {  # millions of parameters, all and active, from the reports and model cards
    "mixtral_8x7b": (46_700, 12_900),
    "qwen3_30b_a3b": (30_500, 3_300),
    "deepseek_v3": (671_000, 37_000),
    "gpt_oss_20b": (20_900, 3_600),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_have_the_published_number_of_parameters(name):
    """All parameters agree with what was published to half a percent, those of a token to two."""
    settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    model = models.from_config(settings["config"], router=settings.get("router"), vocab_multiple=1)
    total = sum(leaf.numel() for leaf in tree.leaves(model.abstract_params)) / 1e6
    active = models.flops_per_token(model, 0, causal=True) / 6e6
    if name != "gpt_oss_20b":  # its card leaves the lookup of embeddings out
        active += model.abstract_params.embed.table_VD.numel() / 1e6
    assert abs(total / PUBLISHED[name][0] - 1) < 0.005
    assert abs(active / PUBLISHED[name][1] - 1) < 0.02


def test_layers_behind_the_last_are_left_out(make_folder):
    """A checkpoint of DeepSeek-V3 has layers that predict further tokens; they are not read, and no other name is forgiven."""
    folder, _ = make_folder("deepseek_v3")
    params = models.from_hf(folder)[1]
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    extra = {f"model.layers.2.{name}": torch.zeros(3) for name in ("eh_proj.weight", "self_attn.o_proj.weight")}
    safetensors.torch.save_file({**tensors, **extra}, file, metadata={"format": "pt"})
    again = models.from_hf(folder)[1]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(again), strict=True))
    safetensors.torch.save_file({**tensors, "model.layers.1.eh_proj.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.eh_proj\.weight"):
        models.from_hf(folder)


def test_the_bias_of_the_choice_is_updated_from_counts():
    """Every router with a bias has an update from the counts of its layer; models without one have none."""
    model = built("deepseek_v3", router={"bias_rate": 0.5}, num_hidden_layers=3)
    assert sorted(model.updates) == ["layers.1.mlp.choice_bias_E", "layers.2.mlp.choice_bias_E"]
    metric, update = model.updates["layers.2.mlp.choice_bias_E"]
    assert metric == "layers.2.expert_counts"
    assert update(torch.zeros(4), torch.tensor([0, 1, 2, 1])).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert not built("qwen3_moe").updates


def test_a_loss_of_the_whole_step_is_not_cut_into_microbatches():
    """With global_aux_loss a step is one microbatch; more are refused, with the loss that would do."""
    model = built("qwen3_moe", router={"global_aux_loss": 0.1})
    assert compile_step(model, AdamW(lr=1e-3), Mesh(dp=1), "ddp", (4, 8)).num_microbatches == 1
    with pytest.raises(ConfigError, match=r"(?s)cannot cut a step into 2 microbatches: global_aux_loss .*aux_loss, which is"):
        compile_step(model, AdamW(lr=1e-3), Mesh(dp=1), "ddp", (4, 8), num_microbatches=2)


@pytest.mark.parametrize("kind", SPARSE)
def test_fresh_parameters(kind):
    """Biases start at zero, the matrices of experts at the config's deviation, and every expert is another."""
    params = built(kind, initializer_range=0.3).init(3).layers[1].mlp
    assert abs(float(params.up_EDF.std()) / 0.3 - 1) < 0.1
    assert not torch.equal(params.up_EDF[0], params.up_EDF[1])
    assert all(not leaf.any() for path, leaf in tree.leaves_with_path(params) if "bias" in path)


def test_side_losses_reach_the_chain():
    """Segments with experts give side losses, and drop, in a pass that trains, whatever the batch has; counts always."""
    model = built("qwen3_moe", router={"aux_loss": 0.1, "z_loss": 0.01, "capacity_factor": 1.0})
    params, (embed, layer, *_) = model.init(1), model.segments
    context = model.context({"tokens": TOKENS, "labels": TOKENS})
    for training in (False, True):
        x, _ = embed.fn((params.embed,), None, context, training=training)
        _, losses, *metrics = layer.fn((params.layers[0],), x, context, training=training)
        assert set(losses) == ({"aux_loss", "z_loss"} if training else set())
        assert set(metrics[0]) == {"expert_counts", *(("dropped",) if training else ())}
        assert int(metrics[0]["expert_counts"].sum()) == TOKENS.numel() * 3


def test_a_folder_keeps_no_options_of_training(make_folder, tmp_path):
    """What is exported is the config that was imported: options of routers are of the run, not of the model."""
    folder, _ = make_folder("qwen3_moe")
    model, params = models.from_hf(folder, router={"z_loss": 0.1})
    models.to_hf(model, params, tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out"))
    assert before == after
