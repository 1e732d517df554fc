"""Tasks and losses: scores are those of the plain model, rows count once, files that cannot be used are refused line by line."""

import json

import numpy as np
import pytest
import torch

from mpar.data import Documents, byte_tokenizer
from mpar.errors import DataError
from mpar.infer import Assistant, Question, Sampling, check_task, continuation_logprob, loss_of, read_task, score_task
from mpar.infer._scores import scores_of_logits
from tests.infer.test_assistant import SIZES, assistant_of, tiny

__all__ = ["tiny"]


def plain_logprob(tiny, context: str, continuation: str) -> float:
    """The log-probability of a text behind another, by the model alone; texts are bytes, and a space before it belongs to it."""
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    model, params = tiny
    tokens = torch.tensor([list((context + continuation).encode())])
    logprobs = model.apply(params, tokens)[0].log_softmax(-1)
    begin = len(context.encode())
    return sum(float(logprobs[i - 1, tokens[0, i]]) for i in range(begin, tokens.shape[1]))


def test_choices_are_scored_by_their_logprobs(tiny):
    """The largest sum, and the largest sum by byte, of the choices behind the prompt; spaces before a choice belong to it."""
    assistant = assistant_of(tiny)
    prompts, choices = ["The sky is", "One and one is "], ("x", " much longer", " no")
    for prompt in prompts:
        for choice in choices:
            score, is_greedy = continuation_logprob(assistant, prompt, choice)
            assert score == pytest.approx(plain_logprob(tiny, prompt, choice), abs=1e-4)
            assert is_greedy in (True, False)
    scores = [[plain_logprob(tiny, prompt, choice) for choice in choices] for prompt in prompts]
    best = [int(np.argmax(row)) for row in scores]
    by_byte = [int(np.argmax([s / len(choice) for s, choice in zip(row, choices, strict=True)])) for row in scores]
    questions = [Question(prompt, answer, choices) for prompt, answer in zip(prompts, best, strict=True)]
    accuracy, other = score_task(assistant, questions)
    assert (accuracy.name, accuracy.value, accuracy.error, accuracy.num_questions) == ("accuracy", 1.0, 0.0, 2)
    assert other.value == sum(a == b for a, b in zip(best, by_byte, strict=True)) / 2
    wrong = [Question(question.prompt, (question.answer + 1) % 3, choices) for question in questions]
    assert score_task(assistant, wrong)[0].value == 0.0


class Counting:
    """A model that always writes the next letter."""

    sizes, shares_pages, vocab_size, adapters = SIZES, False, 259, ()

    def scores(self, texts, num_likeliest, adapter=0):
        """See `Runner`."""
        logits = [torch.nn.functional.one_hot(text[:-1] + 1, 259).float() for text in texts]
        return [scores_of_logits(one, text, num_likeliest) for one, text in zip(logits, texts, strict=True)]


def test_greedy_continuations_are_known_as_such():
    """What the model writes itself is greedy; with another last letter, or another first one, it is not."""
    assistant = Assistant(Counting(), byte_tokenizer())
    assert continuation_logprob(assistant, "abc", "def")[1]
    assert not continuation_logprob(assistant, "abc", "deg")[1]
    assert not continuation_logprob(assistant, "abc", "xyz")[1]


def test_an_empty_context_begins_with_the_first_token(tiny):
    """The end-of-text token stands for the beginning, and is not scored itself."""
    model, params = tiny
    logprobs = model.apply(params, torch.tensor([[258, 97]]))[0].log_softmax(-1)
    expected = float(logprobs[0, 97] + logprobs[1, 98])
    assert continuation_logprob(assistant_of(tiny), "", "ab")[0] == pytest.approx(expected, abs=1e-4)


def test_answers_are_compared_as_texts(tiny):
    """An answer counts if it is the right text but for white space; prompts of both kinds are done at the same time."""
    assistant = assistant_of(tiny)
    said = [assistant.answer(["hi"], Sampling(max_tokens=5))[0]]
    right = Question("hi", f" {said[0]} ", (), is_chat=True, max_tokens=5, stop=())
    wrong = Question("hi", "something else", (), is_chat=True, max_tokens=5, stop=())
    done = []
    if said[0]:
        (score,) = score_task(assistant, [right, wrong, wrong], done.append)
        assert (score.name, score.value, done[-1]) == ("exact_match", pytest.approx(1 / 3), 3)
        assert score.error == pytest.approx((2 / 9 / 2) ** 0.5)


def test_the_loss_of_a_set_is_that_of_its_rows(tiny):
    """The mean over all tokens that are trained on, of documents of unlike lengths, each read by itself."""
    model, params = tiny
    texts = [(b"first text", 3), (b"second, longer text", 0), (b"xy", 1)]
    rows = [(list(text), [i >= skipped for i in range(len(text))]) for text, skipped in texts]
    total, count = 0.0, 0
    for tokens, trained in rows:
        logprobs = model.apply(params, torch.tensor([tokens]))[0].log_softmax(-1)
        for i in range(1, len(tokens)):
            if trained[i]:
                total, count = total - float(logprobs[i - 1, tokens[i]]), count + 1
    found = loss_of(assistant_of(tiny).engine.runner, Documents.from_ids(rows))
    assert (found.num_tokens, found.num_documents) == (count, 3)
    assert found.loss == pytest.approx(total / count, abs=1e-5)
    assert found.perplexity == pytest.approx(np.exp(total / count), rel=1e-4)


def test_lines_of_a_task_are_checked(tmp_path):
    """Each line that cannot be used is named; without such lines, all questions are read."""
    good = [
        {"prompt": "a", "choices": ["x", "y"], "answer": 1},
        {"prompt": "a", "answer": "z"},
        {"prompt": "a", "answer": "z", "chat": True, "stop": ["."], "max_tokens": 3},
    ]
    bad = [
        "{",
        "3",
        '{"answer": 1}',
        '{"prompt": "a"}',
        '{"prompt": "a", "answer": " "}',
        '{"prompt": "a", "choices": ["x"], "answer": 0}',
        '{"prompt": "a", "choices": ["x", "y"], "answer": 2}',
        '{"prompt": "a", "choices": ["x", "y"], "answer": true}',
        '{"prompt": "a", "answer": "x", "stop": "."}',
        '{"prompt": "a", "answer": "x", "max_tokens": 0}',
    ]
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, good)) + "\n\n")
    questions = read_task(path)
    assert questions[1:] == [Question("a", "z", line=2), Question("a", "z", (), True, 3, (".",), line=3)]
    path.write_text("\n".join(bad))
    with pytest.raises(DataError) as raised:
        read_task(path)
    assert all(f"line {number}:" in str(raised.value) for number in range(1, 9)) and "and 2 more" in str(raised.value)
    path.write_text("\n")
    with pytest.raises(DataError, match="it has no line"):
        read_task(path)


def test_questions_that_do_not_fit_are_listed(tiny):
    """By their lines, before any is scored: the numbers of choices that are cut could not be compared."""
    assistant, room = assistant_of(tiny), SIZES.length
    fits = [Question("a" * (room - 1), 0, ("x", "y"), line=1), Question("a" * (room - 1), "x", line=2)]
    wrong = [
        Question("a" * room, 0, ("x", "y"), line=4),
        Question("a", 0, ("x", "y" * room), line=5),
        Question("a" * room, "x", line=6),
        Question("a" * room, "x", (), True, line=7),
        Question("\ud800", "x", line=9),
    ]
    check_task(assistant, fits)
    with pytest.raises(DataError) as raised:
        score_task(assistant, [*fits, *wrong])
    said = str(raised.value)
    assert all(f"line {question.line}: " in said for question in wrong)
    assert not any(f"line {question.line}: " in said for question in fits)
    assert f"line 5: the prompt and its longest choice have {room + 1} tokens, and {room} fit (length=)" in said
    assert assistant.is_idle
