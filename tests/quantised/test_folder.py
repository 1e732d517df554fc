"""Folders of bitsandbytes: what it stores is read bit by bit, what is written it loads; shards are read alone."""

import json

import bitsandbytes
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mpar import adapters, models, testing, tree
from mpar.adapters import LoRA
from mpar.errors import CheckpointError, ConfigError
from mpar.quantised import QuantisedReader, is_quantised_folder, quantise, write_quantised

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
TOKENS = torch.arange(12)[None] % 60


def linear(weight, kind):
    """The state of a layer of bitsandbytes that has this weight."""
    rows, columns = weight.shape
    if kind == "nf4":
        layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compress_statistics=True)
        layer.weight = bitsandbytes.nn.Params4bit(weight, quant_type="nf4", compress_statistics=True, requires_grad=False)
    else:
        layer = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
        layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu").state_dict()


@pytest.fixture(scope="module", params=["nf4", "int8"])
def stored(request, tmp_path_factory):
    """`(kind, model, plain parameters, folder)`, of which bitsandbytes made the folder."""
    kind, folder = request.param, tmp_path_factory.mktemp("bitsandbytes")
    model = models.from_config(LLAMA)
    params = tree.map_leaves(lambda x: x.half().float(), model.init(0))  # in which bitsandbytes quantises to int8
    tensors = {}
    for name, x in models.hf_tensors(model, params).items():
        if "_proj" in name:
            made = linear(x, kind)
            tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in made.items()}
        else:
            tensors[name] = x
    tensors = {name: x for name, x in tensors.items() if not name.endswith("weight_format")}
    save_file(tensors, folder / "model.safetensors")
    config = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": kind == "nf4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return kind, model, params, folder


def test_what_bitsandbytes_wrote_is_read(stored):
    """Every part is what quantising the weights gives here."""
    kind, model, params, folder = stored
    assert is_quantised_folder(folder)
    quantised = quantise(model, kind)
    expected, found = quantised.quantise_params(params), QuantisedReader(quantised, folder).params()
    for (path, a), (other, b) in zip(tree.leaves_with_path(expected), tree.leaves_with_path(found), strict=True):
        assert path == other and torch.equal(a, b), path


def test_what_is_written_is_what_bitsandbytes_writes(stored, tmp_path):
    """Names, shapes, dtypes and bytes; the state of a matrix has the same entries."""
    kind, model, params, folder = stored
    quantised = quantise(model, kind)
    write_quantised(quantised, quantised.quantise_params(params), tmp_path / "out")
    theirs, ours = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        if "quant_state" in name:
            a, b = (json.loads(bytes(state.tolist())) for state in (x, ours[name]))
            assert {**a, "dtype": ""} == {**b, "dtype": ""}
        else:
            assert x.dtype == ours[name].dtype and torch.equal(x, ours[name]), name
    with pytest.raises(CheckpointError, match="already holds weights"):
        write_quantised(quantised, quantised.quantise_params(params), tmp_path / "out")


@pytest.mark.parametrize("stored", ["nf4"], indirect=True)  # LLM.int8 quantises activations, too: its logits are others
def test_transformers_gives_the_same_logits(stored, tmp_path):
    """Logits of the module that transformers makes, with layers of bitsandbytes that load what was written."""
    kind, model, params, _ = stored
    quantised = quantise(model, kind)
    parts = quantised.quantise_params(params)
    write_quantised(quantised, parts, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA)).eval()
    for name, layer in list(module.named_modules()):
        if name.endswith("_proj"):
            parent, _, field = name.rpartition(".")
            stats = {key: x for key, x in tensors.items() if key.startswith(f"{name}.weight.")}
            made = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32)
            weight = bitsandbytes.nn.Params4bit.from_prequantized(tensors[f"{name}.weight"], stats, device="cpu", module=made)
            made.weight = weight
            setattr(module.get_submodule(parent), field, made)
    module.load_state_dict({name: x for name, x in tensors.items() if "_proj" not in name}, strict=False)
    expected = module(TOKENS).logits
    found = model.apply(quantised.dequantise_params(parts, torch.float32), TOKENS)
    testing.assert_close(found, expected, name="logits")


def test_shards_and_adapters_are_read_alone(stored):
    """A rank reads its part of codes; adapters begin as they do elsewhere, unless they begin with values of the weight."""
    kind, model, params, folder = stored
    quantised = quantise(adapters.add(model, LoRA(rank=2)), kind)
    reader = QuantisedReader(quantised, folder)
    path = "layers.1.attention.q_DNH.codes"
    whole = tree.get(quantise(model, kind).quantise_params(params), path)
    assert torch.equal(quantised.first_leaf(0, path, (slice(2, 4), slice(None), slice(None)), reader), whole[2:4])
    a = "adapters.default.layers.1.attention.q_DNH.a"
    assert torch.equal(quantised.first_leaf(0, a, None, reader), quantised.init_leaf(0, a))
    with_gain = quantise(adapters.add(model, LoRA(rank=2, dora=True)), kind)
    with pytest.raises(CheckpointError, match="has only its codes"):
        QuantisedReader(with_gain, folder).params()


def test_what_does_not_fit_is_listed(stored):
    """Matrices that are quantised on one side only, and parts of fused matrices."""
    kind, model, _, folder = stored
    with pytest.raises(CheckpointError, match=r"quantised in the folder only: model\.layers\.0\.self_attn\.q_proj\.weight"):
        QuantisedReader(quantise(model, kind, exclude=("q_proj",)), folder)
    with pytest.raises(CheckpointError, match=r"missing: lm_head"):
        QuantisedReader(quantise(model, kind, targets=("lm_head",)), folder)
    phi = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
    fused = quantise(models.from_config(phi), kind)
    with pytest.raises(ConfigError, match="quantised one by one"):
        write_quantised(fused, fused.init(0), folder / "none")
