"""The screen of a runner: greedy answers are those of all logits, on one rank and on several; where there is none."""

import dataclasses

import pytest
import torch

from mpar import Mesh, adapters, models, tree
from mpar.infer import Engine, Sampling, Sizes, Tables, _program_runner, _screened_head
from mpar.infer._screened_head import ScreenedHead, screened_head
from mpar.infer.compile import ProgramRunner
from mpar.precision import precision
from mpar.quantised import quantise
from mpar.runtime import _inductor
from mpar.strategy import preset
from tests.infer.banks import LORAS
from tests.infer.simulated_runner import SimulatedRunner
from tests.infer.test_packed import recorded
from tests.kernels_in_cpp import needs_kernels
from tests.models.variants import KINDS

pytestmark = needs_kernels
SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=48)
PROMPTS = [[1, 5, 2], [7], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18, 54, 39], [4] * 9, [60, 0]]
NONE = torch.zeros(4, dtype=torch.int64)
TABLES = Tables.of(NONE[:1], NONE[:1], NONE[:1], NONE[:, None], NONE)._replace(greedy_R=NONE == 0)
GREEDY, DRAWN = Sampling(max_tokens=8), Sampling(max_tokens=8, temperature=1.0, seed=3)


def _model(kind="llama", dtype=torch.float32, **changes):
    base = {**KINDS[kind].base, "initializer_range": 0.3, "vocab_size": 500, **changes}
    return models.build(kind, base).with_dtype(dtype)


def _answers(runner, samplings, logits=None):
    """Answers to all prompts, with one of `samplings` each; `logits` gets those of each step."""
    step = runner.step

    def kept(tables):
        found = step(tables)
        if logits is not None:
            logits.append(found[tables.last_R >= 0])
        return found

    runner.step = kept
    engine = Engine(runner)
    requests = [engine.add(prompt, samplings[i % len(samplings)]) for i, prompt in enumerate(PROMPTS)]
    for _ in engine.run():
        pass
    runner.step = step
    return [request.answer for request in requests]


def _without_screen(monkeypatch, make):
    """The runner that `make` makes where there is no kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(_program_runner, "screened_head", lambda *args: None)
        return make()


MESHES = {
    "tp": (Mesh(tp=2), "tp", SIZES),
    "pp": (Mesh(pp=2), "tp", SIZES),
    "cp": (Mesh(cp=2), "ddp", SIZES),
    "dp": (Mesh(dp=2), "ddp", dataclasses.replace(SIZES, groups=2)),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", ["one", "inductor", *MESHES])
def test_greedy_answers_are_those_of_all_logits(mesh, tied, monkeypatch):
    """And few logits are computed, but for steps in which a row draws its token."""
    model = _model(tie_word_embeddings=tied)
    params = model.init(0)
    monkeypatch.setattr(_inductor, "inductor_compile", recorded)
    if mesh in MESHES:
        runner = SimulatedRunner(model, params, MESHES[mesh][2], *MESHES[mesh][:2])
    else:
        runner = ProgramRunner(model, params, SIZES, execution="eager" if mesh == "one" else mesh)
    plain = _without_screen(monkeypatch, lambda: ProgramRunner(model, params, SIZES))
    logits, logits_of_draws = [], []
    assert _answers(runner, [GREEDY], logits) == _answers(plain, [GREEDY])
    assert _answers(runner, [GREEDY, DRAWN], logits_of_draws) == _answers(plain, [GREEDY, DRAWN])
    lies_by_columns = tied or mesh not in MESHES  # nothing is packed for simulated ranks
    assert (torch.cat(logits).isneginf().float().mean() > 0.7) == lies_by_columns
    assert not logits_of_draws[0].isneginf().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_parameters_have_another_screen(dtype, monkeypatch):
    """After `load`, answers are those of a new runner. A matrix of float32 that is no embedding is then read as it came."""
    for tied in (True, False):
        model = _model(dtype=dtype, tie_word_embeddings=tied)
        first, second, logits = model.init(0), model.init(1), []
        runner = ProgramRunner(model, first, SIZES)
        _answers(runner, [GREEDY])
        runner.load(dict(tree.leaves_with_path(second)))
        expected = _answers(_without_screen(monkeypatch, lambda: ProgramRunner(model, second, SIZES)), [GREEDY])  # noqa: B023
        assert _answers(runner, [GREEDY], logits) == expected
        assert bool(torch.cat(logits).isneginf().any()) == (tied or dtype == torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_without_the_output_matrix(tied):
    """A stage that has the embedding alone has no screen, also if the embedding is the output matrix, and runs as others do."""
    model = _model(tie_word_embeddings=tied)
    runner = SimulatedRunner(model, model.init(0), SIZES, Mesh(pp=2), "tp")
    program = runner.programs[1]
    for rank in range(2):
        leaves = {leaf.path: runner.state.leaves[leaf.path] for leaf in program.part(rank).state_in}
        assert ScreenedHead(model).greedy(TABLES, 1, leaves).all() == (tied or rank == 0)  # as it comes, a head lies by rows


def test_a_screen_is_made_where_it_is_needed(monkeypatch):
    """Not for rows that draw their tokens, nor for many rows; it is given up where it leaves out nothing."""
    made = []
    monkeypatch.setattr(_screened_head, "fill_screen", lambda *args: made.append(args))
    model = _model()
    params = model.init(0)
    _answers(ProgramRunner(model, params, SIZES), [DRAWN])
    assert not made and not ScreenedHead(model).greedy(TABLES, 5, {}).any()
    runner, masks = ProgramRunner(model, params, SIZES), []  # its screen is never filled, so that all logits can be the largest
    run = runner._run
    monkeypatch.setattr(runner, "_run", lambda count, batch: masks.append(bool(batch["greedy"].any())) or run(count, batch))
    assert _answers(runner, [GREEDY]) == _answers(runner, [GREEDY]) == _answers(runner, [GREEDY])
    assert len(made) == 1 and masks == [True] * 16 + [False] * (len(masks) - 16) and len(masks) > 32


@pytest.mark.parametrize(
    "more",
    [
        {"bias": {7: 3.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"min_tokens": 4, "stop_ids": (26,)},
        {"num_alternatives": 3},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_else_is_asked_of_logits(more, monkeypatch):
    """Answers, with their log-probabilities, are those of all logits."""
    model = _model()
    params = model.init(0)
    sampling = Sampling(max_tokens=8, **more)
    runners = ProgramRunner(model, params, SIZES), _without_screen(monkeypatch, lambda: ProgramRunner(model, params, SIZES))
    found = []
    for runner in runners:
        engine = Engine(runner)
        requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
        list(engine.run())
        found.append([request.chosen for request in requests])
    assert found[0] == found[1]


def test_where_there_is_no_screen():
    """Where the product is with another matrix than the stored one, where a soft cap may make logits equal, without a kernel."""
    one, cpu, fp32 = Mesh(tp=1), torch.device("cpu"), precision(None)

    def has_one(model, mesh=one, strategy="tp", how=fp32, device=cpu):
        return screened_head(model, mesh, preset(strategy), how, device) is not None

    model = _model()
    assert has_one(model) and has_one(_model(dtype=torch.bfloat16)) and has_one(model, Mesh(tp=2, pp=2, cp=2))
    assert not has_one(_model(dtype=torch.float64)) and not has_one(model, device=torch.device("meta"))
    assert not has_one(model, how=precision("bf16")) and not has_one(model, Mesh(fsdp=2), "zero3")
    assert not has_one(_model("gemma2", final_logit_softcapping=3.0))
    assert not has_one(quantise(model, "int8")) and not has_one(adapters.add(model, LORAS["few"]))
