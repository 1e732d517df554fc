"""What tokens of conversations weigh in the loss."""

import re

import pytest
import torch

from mpar import data
from mpar.data import DataConfig, TokenWeights, load_dataset
from mpar.errors import ConfigError

ANSWERS = {
    "react": [
        ("Thought: I add. ", 1), ("Action: add\nAction Input: 1 Observation:", 2), (" 2 ", 0), ("Final Answer: 2<|im_end|>", 1),
    ],
    "hermes": [("a", 1), ("<tool_call>\n{}\n</tool_call>", 2), ("b", 1), ("<tool_call>c</tool_call>", 2), ("<|im_end|>", 1)],
    "qwen": [("✿FUNCTION✿: f ✿ARGS✿: a ✿RESULT✿:", 2), (" r ", 0), ("✿RETURN✿: so<|im_end|>", 1)],
    "alpha_umi": [("Next: caller", 2), ("<|im_end|>", 1)],
    "agentflan": [
        ("Thought: t Name:", 1), (" add ", 3), ("Arguments:", 1), (" x ", 3), ("Observation:", 2), (" y", 0), ("<|im_end|>", 1),
    ],
    "ignore_empty_think": [("<think>\n\n</think>\n\n", 0), ("the <think>\n</think> answer<|im_end|>", 1)],
    "ignore_think_prefix": [("<think>\n", 0), ("so</think> it is<|im_end|>", 1)],
    "hermes+ignore_empty_think": [("<think> </think>", 0), ("<tool_call>x</tool_call>", 2), (".<|im_end|>", 1)],
}  # fmt: skip


def chat(*answers, **message):
    return [
        turn for text in answers for turn in ({"role": "user", "content": "q"}, {"role": "assistant", "content": text, **message})
    ]


def runs_of(tokenizer, ids, weights):
    """Neighbouring tokens of equal weight as text, with this weight."""
    runs = []
    for token, weight in zip(ids, weights, strict=True):
        if not runs or runs[-1][1] != weight:
            runs.append(([], weight))
        runs[-1][0].append(token)
    return [(tokenizer.decode(run), weight) for run, weight in runs]


@pytest.mark.parametrize("name", ANSWERS)
def test_strategies_of_ms_swift(byte_tokenizer, name):
    """Each marks the parts that ms-swift's tables weigh, and leaves the end of the answer at 1."""
    answer = "".join(text for text, _ in ANSWERS[name])
    expected = [weight for text, weight in ANSWERS[name] for _ in byte_tokenizer.encode(text)]
    messages = chat(answer.removesuffix("<|im_end|>"))
    ids, weights = byte_tokenizer.encode_chat(messages, weights=TokenWeights.parse(name))
    prompt = len(ids) - len(expected) - 1
    assert weights == [0] * prompt + expected + [0]


def test_question_weighs_the_whole_answer(byte_tokenizer):
    """With agentflan, an answer to a question for parameters weighs 3, whatever is in it."""
    asked = [{"role": "user", "content": "What is the value of x?"}, {"role": "assistant", "content": "Name: y"}]
    runs = runs_of(byte_tokenizer, *byte_tokenizer.encode_chat(asked, weights=TokenWeights.parse("agentflan")))
    assert [run for run in runs if run[1]] == [("Name: y", 3), ("<|im_end|>", 1)]


@pytest.mark.parametrize("marked", [True, False])
def test_bases_and_what_messages_say(byte_tokenizer, marked):
    """`loss` beats the base, numbers beat patterns, ranges beat both; nothing else is looked at."""
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant:{% endif %}"
    template = byte_tokenizer.template.source if marked else plain
    tokenizer = data.Tokenizer(byte_tokenizer._backend, special=byte_tokenizer.special, chat_template=template)

    def weighed(text, *messages):
        weights = TokenWeights.parse(text)
        ids, weight_of = tokenizer.encode_chat(messages, weights=weights)
        return [run for run in runs_of(tokenizer, ids, weight_of) if run[1]]

    first, second = chat("one", "two")[1::2]
    user = {"role": "user", "content": "q"}
    end = "<|im_end|>"
    assert weighed("last_round", user, first, user, second) == [("two" + end, 1)]
    assert weighed("last_round", user, {**first, "loss": True}, user, {**second, "loss": False}) == [("one" + end, 1)]
    assert weighed("default", user, {**first, "weight": 0}, user, second) == [("two" + end, 1)]
    assert weighed("default+rows", user, {**first, "loss_scale": 0.5}, user, second) == [("one" + end, 0.5), ("two" + end, 1)]
    assert weighed("default+rows", user, {**first, "weights": [[1, 2, 3]]}) == [("o", 1), ("n", 3), ("e" + end, 1)]
    assert weighed("default", user, {**first, "weights": [[1, 2, 0]]}) == [("o", 1), ("e" + end, 1)]
    everything = tokenizer.decode(tokenizer.apply_chat_template([user, first]))
    assert weighed("all", user, first) == [(everything, 1)]
    without = weighed("all", user, {**first, "loss": False})
    assert "".join(text for text, _ in without) == everything.replace("one" + end, "")
    tokenizer.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"loss": "false"}, "has 'loss' 'false', neither true nor false"),
        ({"weight": -1}, "has 'weight' -1, not a number from 0 on"),
        ({"loss_scale": True}, "has 'loss_scale' True"),
        ({"weights": [[2, 1, 1]]}, r"has 'weights' \[\[2, 1, 1\]\], not a list of"),
        ({"weights": [[0, 9, 1]]}, "beyond the 3 characters"),
        ({"weights": [[0, 2, 1], [1, 3, 0]]}, "overlap"),
        ({"weight": 0.3}, r"a weight of 0\.3: .* data\.token_weights=default\+rows"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_used(byte_tokenizer, write_rows, given, reason):
    """Such a row is malformed, and says why; it is not read as if it had no weights."""
    path = write_rows({"messages": chat("one", **given)}, {"messages": chat("two")})
    report = load_dataset(DataConfig("sft", (path,), 1, 64), byte_tokenizer).report
    assert (report.num_used, report.num_malformed) == (1, 1)
    assert re.search(reason, report.first_malformed), report.first_malformed


def test_batches_have_the_weights(byte_tokenizer, write_rows, tmp_path):
    """At each label its weight, at others 0, the same from the cache; batches of weights 0 and 1 have none."""
    path = write_rows({"messages": chat("ab", weight=0.5)}, {"messages": chat("c", weights=[[0, 1, 2.5]])})
    config = DataConfig("sft", (path,), 1, 128, shuffle=False, token_weights="default+rows", cache_dir=str(tmp_path / "cache"))
    for cached in (False, True):
        batches = load_dataset(config, byte_tokenizer)
        batch = batches.batch(0)
        assert (batches.report.cached, batch["token_weights"].dtype) == (cached, torch.float32)
        trained = batch["labels"] != -100
        assert batch["token_weights"][trained].tolist() == [0.5, 0.5, 0.5, 2.5, 1]
        assert not batch["token_weights"][~trained].any()
    assert "token_weights" not in load_dataset(
        DataConfig("sft", (write_rows({"messages": chat("c")}),), 1, 128), byte_tokenizer
    ).batch(0)


@pytest.mark.parametrize("text", ["none", "default+all", "hermes+hermess", "", "rows+"])
def test_names_that_there_are_not(text):
    """They are refused, with those that there are."""
    with pytest.raises(ConfigError, match="ignore_empty_think"):
        TokenWeights.parse(text)
