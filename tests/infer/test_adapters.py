"""Adapters by request: rows of unlike adapters in one step answer as the base with each merged, on every mesh."""

import dataclasses

import pytest
import torch

from mpar import Mesh, adapters, models
from mpar.adapters import bank_of
from mpar.errors import ConfigError
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner
from mpar.strategy import preset
from tests.infer.banks import LORAS, bank_params, merged_params
from tests.infer.simulated_runner import SimulatedRunner
from tests.models.variants import KINDS

SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=40)
PROMPTS = [[1, 5, 2], [7, 9], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18, 54, 39], [1, 5, 2], [1, 5, 2], [4] * 9]
EP = dataclasses.replace(preset("tp"), expert_parallel=2)
MESHES = {
    "tp": ({"tp": 2}, "tp", 1),
    "sp": ({"tp": 2}, "tp_sp", 1),
    "pp": ({"pp": 2}, "tp", 1),
    "cp": ({"cp": 2}, "ddp", 1),
    "dp": ({"dp": 2}, "ddp", 2),
    "zero3": ({"fsdp": 2, "tp": 2}, "zero3_tp", 2),
}
ON_MESHES = [("llama", mesh) for mesh in MESHES] + [("qwen3_moe", "ep"), ("deepseek_v3", "ep")]
ON_ONE = ["llama", "gpt2", "phi3", "gpt_oss", "mamba2"]


def make(kind, dtype=torch.float64, loras=LORAS):
    """A model, its parameters, and a bank with those adapters that fit it."""
    changes = {"initializer_range": 0.3, "tie_word_embeddings": False}
    model = models.build(kind, {**KINDS[kind].base, **changes}).with_dtype(dtype)
    fitting = {name: lora for name, lora in loras.items() if _fits(model, lora)}
    assert len(fitting) > 1
    return model, model.init(0), bank_of(model, fitting)


def _fits(model, lora):
    try:
        return bool(adapters.adapted_matrices(model, lora))
    except ConfigError:
        return False


def answers(runner, asked, count=5):
    """For each (prompt, adapter) the greedy answer, all at once, with the logits that chose it; and the engine."""
    step, last = runner.step, []
    runner.step = lambda *tables: last.append(step(*tables)) or last[-1]
    logits = {}

    def keep(request):
        logits.setdefault(request, []).append(last[-1][request.row])

    engine = Engine(runner, allowed=keep)
    requests = [engine.add(prompt, Sampling(max_tokens=count), adapter=adapter) for prompt, adapter in asked]
    list(engine.run())
    runner.step = step
    return [(request.answer, torch.stack(logits[request])) for request in requests], engine


def mixed(bank):
    """Each prompt with one of the adapters, or without."""
    names = [None, *bank.choices]
    return [(prompt, names[index % len(names)]) for index, prompt in enumerate(PROMPTS)]


def compare(bank, params, runner, tolerance):
    """What the runner of the bank answers, and what the model answers with each adapter merged."""
    found, _ = answers(runner, mixed(bank))
    for name in (None, *bank.choices):
        alone = ProgramRunner(bank.base, merged_params(bank, params, name), SIZES)
        for (prompt, adapter), (answer, logits) in zip(mixed(bank), found, strict=True):
            if adapter == name:
                ((expected, expected_logits),), _ = answers(alone, [(prompt, None)])
                assert answer == expected, f"{prompt} with {name}"
                difference = (logits.log_softmax(-1) - expected_logits.log_softmax(-1)).abs().max()
                assert difference < tolerance, f"{prompt} with {name}: {difference:.1e}"
    assert len({tuple(answer) for answer, _ in found}) > 3


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "mesh"), ON_MESHES)
def test_a_mixed_batch_on_a_mesh(kind, mesh):
    """In float64, rows of several adapters in one step give the tokens of merged models, and log-probabilities to 1e-11."""
    _, params, bank = make(kind)
    axes, strategy, groups = MESHES.get(mesh, ({"tp": 2}, EP, 1))
    runner = SimulatedRunner(bank, bank_params(bank, params), dataclasses.replace(SIZES, groups=groups), Mesh(**axes), strategy)
    compare(bank, params, runner, 1e-11)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ON_ONE)
def test_a_mixed_batch_in_float32(kind):
    """On one rank, tokens of merged models and log-probabilities to 1e-5, whatever has adapters."""
    _, params, bank = make(kind, torch.float32)
    compare(bank, params, ProgramRunner(bank, bank_params(bank, params), SIZES), 1e-5)
