"""Generation: greedy as transformers does it, sampling by frequencies, ends, errors."""

import pytest
import torch
import transformers

from mpar import models, tree
from mpar.errors import ConfigError, DataError
from mpar.infer.compile import generate
from tests.models.variants import KINDS, VARIANTS

CONFIG = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
PROMPT = torch.tensor([[1, 5, 2], [7, 7, 0]])


@pytest.fixture(scope="module")
def tiny():
    """(model, params)."""
    model = models.build("qwen3", CONFIG)
    return model, model.init(0)


@pytest.mark.parametrize("variant", ["gemma3", "phi3_long", "mamba2"])
def test_greedy_equals_transformers(variant, tmp_path):
    """At temperature 0 the tokens are those of transformers' greedy generation: past windows, past a switch of RoPE (which has no
    cache), and with a state."""
    kind, changes = VARIANTS.get(variant, (variant, {}))
    model = models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.4, "tie_word_embeddings": False})
    params = model.init(0)
    models.to_hf(model, params, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = reference.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=18, do_sample=False)
    assert torch.equal(generate(model, params, PROMPT, 18), expected)
    assert len(expected.unique()) > 8


def test_sampling_follows_the_distribution(tiny):
    """First tokens of many equal rows occur as softmax(logits / temperature) says, and differ between rows."""
    model, params = tiny
    rows = PROMPT[:1].expand(4000, 3)
    sampled = generate(model, params, rows, 1, temperature=1.5, seed=3)[:, -1]
    counts = torch.bincount(sampled, minlength=13).double()
    expected = (model.apply(params, PROMPT[:1])[0, -1].double() / 1.5).softmax(-1) * 4000
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 32.9  # chi-square with 12 degrees of freedom exceeds this once in a thousand seeds


def test_sampling_depends_on_seed_row_and_step_alone(tiny):
    """The same seed repeats, another differs; a row's tokens do not depend on how many rows are behind it."""
    model, params = tiny
    first = generate(model, params, PROMPT, 10, temperature=1.0, seed=1)
    assert torch.equal(first, generate(model, params, PROMPT, 10, temperature=1.0, seed=1))
    assert not torch.equal(first, generate(model, params, PROMPT, 10, temperature=1.0, seed=2))
    assert torch.equal(first[:1], generate(model, params, PROMPT[:1], 10, temperature=1.0, seed=1))


def test_steps_draw_independently(tiny):
    """Where every token is equally likely, the tokens of one row are spread over the vocabulary."""
    model, params = tiny
    flat = tree.map_leaves(torch.zeros_like, params)
    row = generate(model, flat, PROMPT[:1], 50, temperature=1.0)[0, 3:]
    assert len(row.unique()) > 8


def test_a_row_that_ended_is_filled_with_its_end(tiny):
    """After one of `eos_ids` a row repeats it, others go on, and nothing is generated once all have ended."""
    model, params = tiny
    free = generate(model, params, PROMPT, 12, temperature=3.0, seed=5)
    end = int(free[0, 5])
    stopped = generate(model, params, PROMPT, 12, temperature=3.0, seed=5, eos_ids=(end,))
    assert (free[0, 6:] != end).any()
    for row, full in zip(stopped, free, strict=True):
        ends = (full[3:] == end).nonzero().flatten()
        length = 3 + (int(ends[0]) + 1 if len(ends) else 12)
        assert torch.equal(row[:length], full[:length])
        assert (row[length:] == end).all()
    alone = generate(model, params, PROMPT[:1], 12, temperature=3.0, seed=5, eos_ids=(end,))
    assert alone.shape[1] == 3 + int((free[0, 3:] == end).nonzero()[0]) + 1


def test_more_tokens_than_positions_are_refused():
    """Where positions are learned, the prompt and what follows must fit; no token is generated before that is known."""
    model = models.build("gpt2", {**KINDS["gpt2"].base, "n_positions": 8})
    params = model.init(0)
    assert generate(model, params, PROMPT, 5).shape == (2, 8)
    with pytest.raises(ConfigError, match=r"cannot generate 6 tokens after 3.*8 positions"):
        generate(model, params, PROMPT, 6)


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        (torch.tensor([[13]]), {}, DataError),
        (torch.tensor([[-1]]), {}, DataError),
        (torch.tensor([1]), {}, DataError),
        (torch.zeros(1, 0, dtype=torch.long), {}, DataError),
        (torch.zeros(1, 1), {}, DataError),
        (PROMPT, {"temperature": -1.0}, ConfigError),
        (PROMPT, {"temperature": float("nan")}, ConfigError),
        (PROMPT, {"max_new_tokens": -1}, ConfigError),
    ],
)
def test_bad_arguments_are_refused(tiny, tokens, options, error):
    """Ids outside the vocabulary, shapes and settings that make no sense raise."""
    with pytest.raises(error, match="cannot generate"):
        generate(*tiny, tokens, **{"max_new_tokens": 2, **options})
