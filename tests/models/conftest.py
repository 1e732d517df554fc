"""Tiny random models of transformers, the reference for ours."""

import re

import pytest
import torch
import transformers

from tests.models.variants import KINDS


@pytest.fixture(scope="session")
def make_reference():
    """`fn(kind, **config)` gives a transformers model in float32 with every parameter drawn, gains and biases too."""

    def make(kind, **config):
        settings = KINDS[kind].make_config(**config)
        settings._attn_implementation = "eager"
        generator = torch.Generator().manual_seed(0)
        model = getattr(transformers, KINDS[kind].model)(settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre, width = (1.0, 0.3) if re.search(r"(norm|\.ln_\w)\.weight$", name) else (0.0, 0.2)
                parameter.copy_(centre + width * torch.randn(parameter.shape, generator=generator))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
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
