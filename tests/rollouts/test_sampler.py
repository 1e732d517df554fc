"""mpar's own sampler: it draws from the model's distribution, with the tensors of the training, and forgets what it knew."""

import pytest
import torch

from mpar import adapters, models, tree
from mpar.adapters import LoRA
from mpar.errors import ShapeError
from mpar.infer import Sizes
from mpar.infer.compile import ProgramRunner, make_runner
from mpar.rollouts import Ask, EngineSampler
from tests.models.variants import KINDS

SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=40)
PROMPTS = [(1, 5, 2, 8, 9, 11, 3, 4, 7), (7,), (3, 9, 27, 11)]
ASKS = [Ask(prompt, 11, choice) for prompt in PROMPTS for choice in range(3)]


def make(kind: str) -> tuple[models.Model, EngineSampler, object]:
    model = models.build(kind, {**KINDS[kind].base, "initializer_range": 0.4})
    runner = make_runner(model, model.init(0), SIZES)
    return model, EngineSampler(lambda params: runner, eos_ids=[0], max_tokens=12), runner


def logps_of(model: models.Model, params: object, ask: Ask, tokens: tuple[int, ...]) -> torch.Tensor:
    """The log-probability of each token of an answer, computed in one forward of everything."""
    ids = torch.tensor([*ask.prompt, *tokens])
    logits = model.apply(params, ids[None, :-1])[0].log_softmax(-1)
    return logits.gather(1, ids[1:, None])[len(ask.prompt) - 1 :, 0]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["qwen3", "mamba2"])
def test_log_probabilities_are_those_of_a_forward_of_the_training(kind):
    """For every answer, to the rounding of float32; after new parameters, those of the new ones."""
    model, sampler, _ = make(kind)
    for seed in (0, 1):
        params = model.init(seed)
        sampler.load(dict(tree.leaves_with_path(params)))
        drawn = sampler.draw(ASKS)
        for ask, answer in zip(ASKS, drawn, strict=True):
            assert len(answer.tokens) == 12 or answer.tokens[-1] == 0
            assert answer.finish == ("stop" if answer.tokens[-1] == 0 else "length")
            expected = logps_of(model, params, ask, answer.tokens)
            assert (expected - torch.tensor(answer.logps)).abs().max() < 1e-4
        assert len({answer.tokens for answer in drawn}) > 6


def test_greedy_answers_are_the_likeliest_tokens():
    """Whatever the seed, each token is the likeliest one in a forward of everything before it, with its log-probability."""
    model, sampler, _ = make("qwen3")
    params = model.init(0)
    sampler.load(dict(tree.leaves_with_path(params)))
    asks = [Ask(prompt, seed, 0, greedy=True) for prompt in PROMPTS for seed in (1, 2)]
    drawn = sampler.draw(asks)
    for ask, answer in zip(asks, drawn, strict=True):
        ids = torch.tensor([*ask.prompt, *answer.tokens])
        logits = model.apply(params, ids[None, :-1])[0][len(ask.prompt) - 1 :, : model.vocab_size]
        assert logits.argmax(-1).tolist() == list(answer.tokens)
        assert (logps_of(model, params, ask, answer.tokens) - torch.tensor(answer.logps)).abs().max() < 1e-4
    assert [answer.tokens for answer in drawn[::2]] == [answer.tokens for answer in drawn[1::2]]


def test_parameters_are_not_copied():
    """The tensors that training updates are those that the sampler reads."""
    model, sampler, runner = make("qwen3")
    params = dict(tree.leaves_with_path(model.init(1)))
    sampler.load(params)
    assert isinstance(runner, ProgramRunner)
    sampler.draw(ASKS[:1])
    for path, leaf in params.items():
        assert runner.state.leaves[f"params.{path}"].data_ptr() == leaf.data_ptr()


def test_an_adapter_draws_with_the_tensors_of_the_training():
    """A policy with an adapter draws from the distribution of the sum, once its matrices are loaded; no weight is copied."""
    model = models.build("qwen3", {**KINDS["qwen3"].base, "initializer_range": 0.4})
    adapted = adapters.add(model, LoRA(rank=3, alpha=12, init="random"))
    first, then = (adapters.first_params(adapted, model.init(0), seed) for seed in (0, 1))
    runner = make_runner(adapted, first, SIZES)
    sampler = EngineSampler(lambda params: runner, eos_ids=[0], max_tokens=12)
    for params in (first, then):
        leaves = dict(tree.leaves_with_path(params))
        sampler.load(leaves)
        for ask, answer in zip(ASKS, sampler.draw(ASKS), strict=True):
            expected = logps_of(model, adapters.merge(adapted, params), ask, answer.tokens)
            assert (expected - torch.tensor(answer.logps)).abs().max() < 1e-4
        assert isinstance(runner, ProgramRunner)
        for path, leaf in leaves.items():
            assert runner.state.leaves[f"params.{path}"].data_ptr() == leaf.data_ptr()


def test_an_answer_does_not_depend_on_what_was_drawn_before_or_beside_it():
    """Alone, or after others, an answer has the same tokens: the noise is that of its seed, choice and place alone."""
    model, sampler, _ = make("qwen3")
    sampler.load(dict(tree.leaves_with_path(model.init(1))))
    together = sampler.draw(ASKS)
    assert [sampler.draw([ask])[0].tokens for ask in ASKS] == [answer.tokens for answer in together]


def test_parameters_of_another_model_are_refused():
    """Everything that differs is listed."""
    model, sampler, _ = make("qwen3")
    params = dict(tree.leaves_with_path(model.init(1)))
    first, second, *_ = params
    wrong = {**params, first: params[first].double(), "extra": torch.zeros(1)}
    del wrong[second]
    with pytest.raises(ShapeError, match=r"is missing") as caught:
        sampler.load(wrong)
    assert all(name in str(caught.value) for name in (first, second, "extra"))
