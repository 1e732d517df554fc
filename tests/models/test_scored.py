"""Log-probabilities of texts: those of the whole forward, in float64, on one rank and on simulated meshes."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models
from mpar.program.compile import compile_forward
from mpar.strategy import preset
from mpar.testing import assert_close
from tests.models.variants import KINDS, VARIANTS

MESHES = {
    "one": (Mesh(tp=1), "tp"),
    "tp2": (Mesh(tp=2), "tp"),
    "pp2": (Mesh(pp=2), "tp"),
    "cp2": (Mesh(cp=2), "zero3"),
    "fsdp2": (Mesh(fsdp=2), "zero3"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("variant", ["llama", "gemma2_caps", "gpt2", "qwen3_moe", "deepseek_v3", "mamba2"])
def test_scores_are_those_of_the_whole_forward(variant, name):
    """The log-probability of every label and the three likeliest tokens; 61 tokens are padded, which no rank may give."""
    mesh, strategy = MESHES[name]
    kind, changes = VARIANTS.get(variant, (variant, {}))
    model = models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.4}, dtype=torch.float64)
    if model.sequential and mesh.axis_size("cp") > 1:
        mesh, strategy = Mesh(tp=2), "tp"
    if variant == "qwen3_moe" and name == "fsdp2":
        strategy = replace(preset("zero3"), expert_parallel=2)
    params = replace(model.init(0), mtp=None)
    chain = models.ScoredDecoder(model.without_multi_token(), 16, mesh.axis_size("fsdp"), 3)
    program = compile_forward(chain, mesh, strategy, chain.batch_shape)
    draw = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 61, (2, chain.groups, 16), generator=draw)
    _, results = program.simulate(program.init_state(params), {"tokens": tokens, "labels": labels})
    logprobs_BSV = model.apply(params, tokens).log_softmax(-1)
    assert_close(results["logprobs"], logprobs_BSV.gather(-1, labels[..., None])[..., 0], name="logprobs")
    values, ids = logprobs_BSV.topk(3, -1)
    assert_close(results["likeliest_logprobs"], values, name="likeliest_logprobs")
    assert torch.equal(results["likeliest"], ids)
