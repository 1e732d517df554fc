"""Choosing tokens: as transformers' processors do it, with draws that nothing else in the batch changes."""

import pytest
import torch
from transformers.generation import logits_process as theirs

from mpar import ops
from mpar.errors import ConfigError
from mpar.infer import History, Sampling, choose
from mpar.infer._choose import _changed
from mpar.infer._draw import draw, kept_scores

VOCABULARY = 40


def logits(seed: int) -> torch.Tensor:
    """Logits with some ties."""
    return (torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4).round(decimals=1)


def random_sampling(seed: int) -> Sampling:
    """Options, some of which cut off tokens."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda *values: values[int(torch.randint(len(values), (1,), generator=draw))]  # noqa: E731
    return Sampling(
        temperature=pick(0.3, 1.0, 1.7),
        top_k=pick(0, 1, 5, 100),
        top_p=pick(1.0, 0.9, 0.4, 1e-3),
        min_p=pick(0.0, 0.1, 0.9),
        repetition_penalty=pick(1.0, 1.3, 0.7),
    )


def scores_of_transformers(logits_V: torch.Tensor, tokens: list[int], sampling: Sampling) -> torch.Tensor:
    """The scores after all processors, in transformers' order."""
    processors = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    processors.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(theirs.MinPLogitsWarper(sampling.min_p))
    scores = logits_V[None]
    for processor in processors:
        scores = processor(torch.tensor([tokens]), scores)
    return scores[0]


def test_candidates_are_those_of_transformers():
    """The tokens that may be drawn, and their probabilities, in rows with unlike options beside each other."""
    samplings = [random_sampling(seed) for seed in range(60)]
    logits_RV = torch.stack([logits(seed) for seed in range(60)])
    kept_RV = kept_scores(_changed(logits_RV, [History([1, 2, 3], [3, 4, 7], each) for each in samplings]), samplings)
    for logits_V, kept_V, sampling in zip(logits_RV, kept_RV, samplings, strict=True):
        expected = scores_of_transformers(logits_V, [1, 2, 3, 3, 4, 7], sampling)
        assert kept_V.isfinite().nonzero().tolist() == expected.isfinite().nonzero().tolist()
        torch.testing.assert_close(kept_V.softmax(-1), expected.softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 50.0])
def test_noise_is_left_out_only_where_no_token_can_win(temperature):
    """Draws are those with noise for all tokens, whether few or all of them can win."""
    logits_RV = torch.stack([logits(seed) for seed in range(50)]) * 3
    keys = [ops.fold_key(seed, "sample") for seed in range(50)]
    uniform_RV = torch.stack([ops.random_uniform(key, (VOCABULARY,)) for key in keys])
    expected = (logits_RV / temperature - (-uniform_RV.log()).log()).argmax(-1)
    assert torch.equal(draw(logits_RV, [Sampling(temperature=temperature)] * 50, keys), expected)


def test_rows_with_unlike_options_are_chosen_as_alone():
    """A row that is greedy, one with bans, one that is drawn, one with log-probabilities: each gets what it gets alone."""
    rows = [
        History([1], [2], Sampling()),
        History([1], [2], Sampling(num_alternatives=3), banned=[int(logits(1).argmax())]),
        History([1], [2, 2], Sampling(temperature=1.2, top_k=7, top_p=0.8, frequency_penalty=1.0, seed=5)),
        History([1], [2], Sampling(temperature=0.9, seed=6, num_alternatives=1, bias={3: 2.0})),
        History([1], [2], Sampling(repetition_penalty=1.5), allowed_V=torch.arange(VOCABULARY) % 3 == 0),
    ]
    logits_RV = torch.stack([logits(seed) for seed in range(5)])
    together = choose(logits_RV, rows)
    assert together == [choose(logits_RV[index, None], [row])[0] for index, row in enumerate(rows)]
    assert together[1].token != int(logits(1).argmax()) and together[4].token % 3 == 0


def test_the_defaults_are_greedy():
    """Without any option the likeliest token is taken; among equal ones the first."""
    tied = torch.zeros(2, VOCABULARY)
    tied[1, [7, 9]] = 2.0
    assert [chosen.token for chosen in choose(tied, [History([1], [], Sampling())] * 2)] == [0, 7]


def test_draws_follow_the_distribution():
    """Frequencies over seeds are softmax(logits / temperature)."""
    row = logits(0)
    expected = (row / 1.5).softmax(-1) * 4000
    rows = [History([1], [], Sampling(temperature=1.5, seed=seed)) for seed in range(4000)]
    tokens = torch.tensor([chosen.token for chosen in choose(row.expand(4000, -1), rows)])
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    likely = expected > 5
    rest = torch.tensor([counts[~likely].sum(), expected[~likely].sum()])
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert float(statistic) < 60  # about 25 degrees of freedom


def test_draws_depend_on_seed_place_and_choice_alone():
    """Other rows of the batch change nothing; another seed, place or choice does."""
    flat = torch.zeros(5, 1000)
    sampling = Sampling(temperature=1.0, seed=3)
    row = History([1, 2], [5], sampling)
    others = [History([1, 2], [5, 5], sampling), History([1, 2], [5], sampling, 1), History([9, 9], [4], sampling)]
    others.append(History([1, 2], [5], Sampling(temperature=1.0, seed=4)))
    tokens = [chosen.token for chosen in choose(flat, [row, *others])]
    assert choose(flat[:1], [row])[0].token == tokens[0] == tokens[3]
    assert len({*tokens[:3], tokens[4]}) == 4


def test_penalties_bias_and_bans():
    """Presence counts once, frequency each time, only in the answer; a bias is added; what is banned never comes."""
    row = History([1], [2, 2, 3], Sampling(presence_penalty=0.5, frequency_penalty=0.25, bias={4: 3.0}), banned=[5])
    (change,) = _changed(torch.zeros(1, 8), [row])
    assert change.tolist() == [0, 0, -1.0, -0.75, 3.0, -torch.inf, 0, 0]


def test_logprobs_are_those_of_the_unchanged_logits():
    """The chosen token's and the likeliest ones', before penalties and temperature."""
    row = logits(3)
    sampling = Sampling(temperature=0.5, bias={11: 50.0}, num_alternatives=3)
    (chosen,) = choose(row[None], [History([1], [2], sampling)])
    expected = row.log_softmax(-1)
    assert chosen.token == 11
    assert chosen.logprob == pytest.approx(float(expected[11]))
    assert [value for _, value in chosen.alternatives] == pytest.approx(expected.topk(3).values.tolist())
    assert choose(row[None], [History([1], [2], Sampling(num_alternatives=0))])[0].alternatives == ()


WRONG = {
    "max_tokens": 0,
    "min_tokens": -1,
    "temperature": float("nan"),
    "top_k": -1,
    "top_p": 0.0,
    "min_p": 1.5,
    "repetition_penalty": 0.0,
    "presence_penalty": 2.5,
    "frequency_penalty": -3.0,
    "bias": {1: float("inf")},
    "stop": ("",),
    "seed": -1,
    "num_alternatives": 21,
}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45, 1e-320])
def test_the_smallest_temperatures_are_greedy(temperature):
    """Scores do not overflow."""
    large = logits(0) * 100
    large[7] = large.max() + 1
    rows = [History([1], [], Sampling(temperature=temperature, seed=seed)) for seed in range(20)]
    assert {chosen.token for chosen in choose(large.expand(20, -1), rows)} == {7}


@pytest.mark.parametrize(
    "values",
    [{"temperature": 10**400}, {"repetition_penalty": 10**400}, {"repetition_penalty": 1e-300}, {"stop_ids": (-1,)}],
    ids=str,
)
def test_values_that_no_tensor_holds_are_refused(values):
    """When a sampling is made, not when a token is chosen."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        Sampling(**values)


def test_impossible_values_are_refused_together():
    """Each is named with what it must be."""
    with pytest.raises(ConfigError) as raised:
        Sampling(**WRONG)
    assert all(f"{name}=" in str(raised.value) for name in WRONG)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"bias": {1: 2.0}}, {"num_alternatives": 2}], ids=str)
def test_rows_without_finite_logits_have_no_token(bad, changes):
    """None takes the place of their token; the others have theirs. One -inf among finite logits is a token that cannot come."""
    logits_RV = torch.randn(3, 8)
    logits_RV[1] = bad
    logits_RV[2, 3] = bad
    found = choose(logits_RV, [History([1], [], Sampling(**changes))] * 3)
    assert [chosen is None for chosen in found] == [False, True, bad != -torch.inf]
