"""Tiny random models of transformers, the reference for ours."""

import pytest
import torch
import transformers

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "starcoder2": "Starcoder2"}


@pytest.fixture(scope="session")
def make_reference():
    """`fn(kind, **config)` gives a transformers model in float32 with every parameter drawn, gains and biases too."""

    def make(kind, **config):
        head = {"head_dim": 8} if kind == "qwen3" else {}
        settings = getattr(transformers, f"{CLASSES[kind]}Config")(**{**BASE, **head, **config})
        settings._attn_implementation = "eager"
        generator = torch.Generator().manual_seed(0)
        model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre, width = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.2)
                parameter.copy_(centre + width * torch.randn(parameter.shape, generator=generator))
        return model

    return make


@pytest.fixture
def make_folder(make_reference, tmp_path):
    """`fn(kind, **config)` gives (folder with the saved model, the transformers model)."""

    def make(kind="llama", **config):
        reference = make_reference(kind, **config)
        reference.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf", reference

    return make
