"""A small Llama in float64 and what a step needs around it."""

import pytest
import torch

from mpar import models, tree
from mpar.optim import AdamW
from mpar.program import State

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def make_model():
    """A function of config changes and dtype that gives a small Llama."""

    def make(dtype: torch.dtype = torch.float64, **changes: object) -> models.Model:
        return models.from_config({**CONFIG, **changes}).with_dtype(dtype)

    return make


@pytest.fixture(scope="session")
def make_state():
    """A function of a model and an optimizer that gives a fresh global state."""

    def make(model: models.Model, optimizer: AdamW | None = None, seed: int = 0) -> State:
        params = tree.leaves_with_path(model.init(seed))
        slots = {f"opt.{slot}.{path}": torch.zeros_like(x) for slot in (optimizer or AdamW(1e-3)).slots for path, x in params}
        return State({**{f"params.{path}": x for path, x in params}, **slots})

    return make


@pytest.fixture(scope="session")
def batch():
    """8 rows of 8 tokens, some labels ignored, a different number in each row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (8, 8), generator=generator)
    labels = torch.randint(0, 96, (8, 8), generator=generator)
    for row in range(8):
        labels[row, : row // 2] = -100
    return {"tokens": tokens, "labels": labels}
