"""Steps with adapters on meshes: exactly those of one rank, with the messages of the model and those of the adapters alone."""

import pytest
import torch

from mpar import Mesh, adapters, models
from mpar.adapters import LoRA
from mpar.compiler import policy
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from tests.adapters.kinds import ADAPTERS, problem_of
from tests.meshes import MESHES
from tests.program.oracle import BASE, DEEPSEEK, GPT_OSS, Problem, Recorder
from tests.program.test_experts import spread

LLAMA = {**BASE, "model_type": "llama", "tie_word_embeddings": False}
NEOX = {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
NEOX |= {"vocab_size": 64, "max_position_embeddings": 64, "use_parallel_residual": False}
OLMOE = {"model_type": "olmoe", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
OLMOE |= {"intermediate_size": 24, "vocab_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
TP = (Mesh(fsdp=2, tp=2), "zero1_tp_sp", {})
EP = (Mesh(fsdp=2, tp=2), spread(2, "zero3_tp_sp"), {})
CASES = {
    "slices": (LLAMA, LoRA(rank=4, targets=r".*\.[qd]\w+_proj"), (Mesh(pp=2), "ddp", {"num_slices": 2, "num_microbatches": 2})),
    "computed again, dropout": (
        LLAMA, LoRA(rank=4, dropout=0.3), (Mesh(fsdp=2), "zero3", {"recompute": policy("full"), "num_microbatches": 2})
    ),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, LoRA(rank=4, targets=("embed_tokens", "lm_head", "v_proj")), TP),
    "latent attention": (DEEPSEEK, LoRA(rank=4), EP),
    "biases": (GPT_OSS, LoRA(rank=4, bias="lora_only", exclude=("k_proj",)), EP),
    "traced": (NEOX, LoRA(rank=4), TP),
    "traced experts": (OLMOE, LoRA(rank=4), EP),
}  # fmt: skip


@pytest.mark.cases(4)
@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_step_is_exact(name, place):
    """Losses and the gradients of adapters are those of one rank in float64; nothing else has a gradient or changes."""
    problem = problem_of(name, MESHES[place])
    problem.check(MESHES[place].compile(problem.chain, problem.shapes))


@pytest.mark.parametrize("case", CASES)
def test_other_models_are_exact(case):
    """The same of models and ways to compute that the matrix of meshes does not have."""
    config, lora, (mesh, strategy, how) = CASES[case]
    problem = Problem(config, (8, 16), adapt=lambda m: adapters.add(m, lora), num_microbatches=how.get("num_microbatches", 1))
    program = compile_step(problem.model, Recorder(), mesh, strategy, problem.shapes, **{"num_microbatches": 1} | how)
    problem.check(program)


def test_several_adapters():
    """Active adapters are added up; one that is not active is neither read nor trained."""
    both = [LoRA(rank=4, targets=("q_proj", "up_proj")), LoRA(rank=2, targets=("q_proj",)), LoRA(targets=("v_proj",))]

    def adapt(model):
        for name, lora in zip(("first", "second", "off"), both, strict=True):
            model = adapters.add(model, lora, name)
        return model.with_active("first", "second")

    problem = Problem(LLAMA, (8, 16), adapt=adapt)
    problem.check(compile_step(problem.model, Recorder(), *TP[:2], problem.shapes))
    merged = adapters.merge(problem.model, problem.params)
    loss, weight = problem.model.base.loss(merged, problem.batch)
    torch.testing.assert_close(loss / weight, problem.loss, rtol=1e-10, atol=0)


def sent(model, mesh, strategy):
    """The messages of a step: those of segments by operation, file and bytes, and those of the ends of the step."""
    uses = compile_step(model, AdamW(lr=1e-3), mesh, strategy, (8, 32)).collectives(0)
    of_segments = [use for use in uses if "/" in use.line and "test_meshes" not in use.line]
    return [(use.op, use.line.partition(":")[0], use.bytes) for use in of_segments], [use for use in uses if not use.line]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_tensor_parallelism_sends_no_more_activations(dora):
    """Under tp with sp, no message of the forward or backward is new; the first layer even sends less."""
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 8, "head_dim": 8}
    base = models.from_config(config)
    model = adapters.add(base, LoRA(rank=2, dora=dora))
    mine, gradients = sent(model, Mesh(tp=2), "tp_sp")
    theirs, _ = sent(base, Mesh(tp=2), "tp_sp")
    norms = [item for item in mine if "adapters/_" in item[1]]
    assert bool(norms) == dora
    assert sum(size for *_, size in norms) <= 4 * 4 * 64 * 4  # of DoRA: squares of the rows of two matrices of two layers
    activations = [item for item in mine if item not in norms]
    for item in set(activations):
        assert activations.count(item) <= theirs.count(item), item
    numbers = sum(torch.Size(leaf.shape).numel() for leaf in model.leaves.values())
    assert sum(use.bytes for use in gradients) < 4 * numbers  # A of q, k, v, gate and up, B of o and down


def test_zero3_reduces_gradients_of_adapters_only():
    """Under zero3 weights are gathered as before; what is reduced are the gradients of the adapters."""
    base = models.from_config({**LLAMA, "head_dim": 2})
    model = adapters.add(base, LoRA(rank=2))
    _, ends = sent(model, Mesh(fsdp=2), "zero3")
    numbers = sum(torch.Size(leaf.shape).numel() for leaf in model.leaves.values())
    reduced = [use for use in ends if use.op in ("reduce_scatter", "all_reduce")]
    assert sum(use.bytes for use in reduced) == 4 * numbers
