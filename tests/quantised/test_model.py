"""Which weights are quantised, what the tree of a quantised model is, and what is refused."""

import pytest
import torch
from torch import Tensor

from mpar import models, testing, tree
from mpar.chain import Axes, check_chain, context_of
from mpar.errors import ConfigError
from mpar.ops import Int8, Nf4
from mpar.quantised import quantise

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 61}
BATCH = {"tokens": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}


def loss_of(chain, params):
    x, context = None, chain.context(BATCH)
    for segment in chain.segments:
        subtrees = tuple(tree.get(params, path) for path in segment.paths)
        x, losses, *_ = segment.fn(subtrees, x, context_of(segment.name, context), training=True)
    return losses["loss"]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("config", [LLAMA, MOE, GPT2], ids=lambda config: config["model_type"])
def test_it_computes_what_the_dequantised_weights_do(config, kind):
    """The loss is that of the plain model with the dequantised weights, but for rounding, because they lie otherwise in memory;
    near it is that of the original ones."""
    model = models.from_config(config, dtype=torch.float64)
    quantised = quantise(model, kind)
    check_chain(quantised, trains=True)
    params = model.init(0)
    parts = quantised.quantise_params(params)
    for (path, x), (other, like) in zip(
        tree.leaves_with_path(parts), tree.leaves_with_path(quantised.abstract_params), strict=True
    ):
        assert (path, x.shape, x.dtype) == (other, like.shape, like.dtype)
        assert torch.equal(quantised.init_leaf(0, path), x)
    loss = loss_of(quantised, parts)
    testing.assert_close(loss, loss_of(model, quantised.dequantise_params(parts, torch.float64)), name="loss", rtol=1e-14)
    testing.assert_close(loss, loss_of(model, params), name="loss", rtol=1e-2)


def test_linear_layers_and_experts_are_quantised():
    """No embedding, head, norm or router; every part is frozen, and only parts are."""
    quantised = quantise(models.from_config(MOE))
    leaves = {path.rpartition(".")[2] for path in quantised.layouts}
    assert leaves == {"q_DNH", "k_DKH", "v_DKH", "o_NHD", "gate_EDF", "up_EDF", "down_EFD"}
    assert len(quantised.frozen) == 4 * len(quantised.layouts)
    assert all(path.rpartition(".")[0] in quantised.layouts for path in quantised.frozen)


def test_parts_have_the_axes_of_the_weight():
    """Rows keep their dims; columns that are no whole blocks are merged."""
    quantised = quantise(models.from_config(LLAMA))
    attention = quantised.abstract_params.layers[0].attention
    axes = quantised.param_axes.layers[0].attention
    assert tuple(attention.q_DNH.codes.shape) == (4, 32, 64) and axes.q_DNH.codes == ("heads", "head", "embed")
    assert axes.q_DNH.absmax == ("heads", "head", None)  # two blocks along embed are too few for many ranks
    assert quantise(models.from_config({**LLAMA, "hidden_size": 1024})).param_axes.layers[0].mlp.up_DF.absmax == ("mlp", "embed")
    assert tuple(attention.o_NHD.absmax.shape) == (128, 2) and axes.o_NHD.absmax == ("embed", "heads")
    assert axes.o_NHD.nested == (None,) and axes.o_NHD.offset == ()
    whole: Int8[Axes] = quantise(models.from_config(LLAMA), "int8").param_axes.layers[0].attention.o_NHD
    assert whole.codes == ("embed", "heads", "head") and whole.absmax == ("embed",)
    experts: Nf4[Tensor] = quantise(models.from_config(MOE)).abstract_params.layers[0].mlp.down_EFD
    assert tuple(experts.codes.shape) == (4, 128, 32) and tuple(experts.offset.shape) == (4,)


def test_targets_and_what_is_trained():
    """Targets and exclusions are ends of names; what a model trains although it freezes others stays as it is."""
    model = models.from_config(LLAMA)
    some = quantise(model, targets=("q_proj", "mlp.up_proj"), exclude=("layers.1.mlp.up_proj",))
    assert list(some.layouts) == ["layers.0.attention.q_DNH", "layers.0.mlp.up_DF", "layers.1.attention.q_DNH"]
    assert [matrix.name for matrix in some.matrices][:2] == ["model.embed_tokens", "model.layers.0.self_attn.k_proj"]
    frozen = models.freeze(model, segments=("embed", "layers.0"))
    assert {path.split(".")[1] for path in quantise(frozen).layouts} == {"0"}


def test_what_is_wrong_is_listed():
    """Names that match nothing, kinds that there are not, rows that are no whole blocks, a second time."""
    model = models.from_config(LLAMA)
    with pytest.raises(ConfigError, match=r"(?s)no matrix is called 'q_prj'.*no matrix is called 'foo'.*its matrices end with"):
        quantise(model, targets=("q_prj",), exclude=("foo",))
    with pytest.raises(ConfigError, match="choose nf4 or int8"):
        quantise(model, "fp4")
    with pytest.raises(ConfigError, match="it is quantised to nf4"):
        quantise(quantise(model))
    odd = models.from_config({**LLAMA, "intermediate_size": 100})
    with pytest.raises(ConfigError, match=r"layers\.\*\.mlp\.down_FD has rows of 100, which are no whole blocks of 64"):
        quantise(odd)
    assert quantise(odd, exclude=("down_proj",)).layouts and quantise(odd, "int8").layouts
