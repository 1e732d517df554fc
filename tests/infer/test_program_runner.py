"""The runner by programs: greedy answers of transformers, many requests at once as each alone, and two real processes."""

import json
import pathlib

import pytest
import torch
import transformers

from mpar import models
from mpar.errors import ConfigError
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner
from mpar.testing import assert_close
from tests.infer.runner_worker import MESHES, found_on
from tests.models.variants import KINDS, VARIANTS
from tests.processes import torchrun

SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=48)
PROMPTS = [[1, 5, 2], [7], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18, 54, 39], [4] * 9, [1, 5, 2, 44, 12], [60, 0]]


def _model(variant: str) -> models.Model:
    kind, changes = VARIANTS.get(variant, (variant, {}))
    return models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.4, "tie_word_embeddings": False})


def _answers(runner: ProgramRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    engine = Engine(runner)
    requests = [engine.add(prompt, Sampling(temperature=0.0, max_tokens=count)) for prompt in prompts]
    for _ in engine.run():
        pass
    return [[chosen.token for chosen in request.chosen] for request in requests]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "variant", ["llama", "qwen3", "gemma2_caps", "gemma3_text", "gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3", "mamba2"]
)
def test_greedy_equals_transformers(variant, tmp_path):
    """Six prompts of unlike lengths at once in four slots, one of them read in two chunks: the tokens of each one alone."""
    model = _model(variant)
    params = model.init(0)
    models.to_hf(model, params, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    answers = _answers(ProgramRunner(model, params, SIZES), PROMPTS, 14)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt])
        how = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
        expected = reference.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        assert answer == expected[0, len(prompt) :].tolist()
    assert len({token for answer in answers for token in answer}) > 8


def test_logits_alone_and_beside_others():
    """A row beside others: the bits of the row alone in float32 at one compiled size; in other sizes to 1e-5."""
    model = _model("llama")
    params = model.init(0)
    pages = torch.arange(1, 37).view(4, 9).repeat(1, 2)[:, :12]
    row = torch.tensor(PROMPTS[0])
    last = torch.full((4,), -1)

    def step(runner: ProgramRunner, beside: bool) -> torch.Tensor:
        others = torch.tensor(PROMPTS[3][:4]) if beside else torch.empty(0, dtype=torch.int64)
        tokens, order = torch.cat([others, row]), torch.cat([torch.arange(len(others)), torch.arange(3)])
        rows, places = torch.tensor([1] * len(others) + [2] * 3), last.clone()
        places[2] = len(tokens) - 1
        return runner.step(tokens, order, rows, pages, places)[2].log_softmax(-1)

    runner = ProgramRunner(model, params, Sizes(rows=4, tokens=12, pages=40, page_size=4, length=48))
    runner.programs.pop(4)
    alone, beside = step(runner, beside=False), step(runner, beside=True)
    assert torch.equal(alone, beside)
    small = step(ProgramRunner(model, params, SIZES), beside=False)
    assert (small - alone).abs().max() < 1e-5


def test_what_is_refused():
    """Rows longer than the learned positions."""
    model = _model("gpt2")
    with pytest.raises(ConfigError, match="with up to 65 tokens in a row: this model has learned 64 positions"):
        ProgramRunner(model, model.init(0), Sizes(rows=2, tokens=4, pages=40, page_size=4, length=65))


@pytest.mark.gloo
def test_two_processes_give_the_same_answers(tmp_path):
    """Two ranks of tp, pp, fsdp and cp, each with an engine of its own: both have the answers and the scores of one process."""
    done = torchrun(pathlib.Path(__file__).with_name("runner_worker.py"), str(tmp_path), num_ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    answers, logprobs = found_on()
    for name in MESHES:
        for rank in range(2):
            found = json.loads((tmp_path / f"{name}{rank}.json").read_text())
            assert found[0] == answers
            for one, expected in zip(found[1], logprobs, strict=True):
                assert_close(torch.tensor(one), torch.tensor(expected), name=f"{name}{rank}")
