"""Tasks: questions with known answers, and how many of them a model answers as it should.

A task is a file with a JSON object in each line. One with `choices` is scored by the log-probabilities that the model gives each
of them behind the prompt, as lm-evaluation-harness does; one without is answered, and the text compared.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpar.errors import ConfigError, DataError, MparError, brief, first_lines
from mpar.files import Unreadable, read_text
from mpar.infer._assistant import Assistant
from mpar.infer._sampling import Sampling

__all__ = ["Question", "Score", "check_task", "continuation_logprob", "read_task", "score_task"]

_MAX_BYTES = 2**30
_MAX_TOKENS = 256


@dataclass(frozen=True)
class Question:
    """One question.

    prompt:     the text that is continued, or the question that is asked if `is_chat`.
    choices:    the texts that may follow; answer: the index of the right one. Without choices, answer is the right text.
    max_tokens: the most tokens of an answer; stop: texts that end it. line: where it stands in its file, from 1 on.
    """

    prompt: str
    answer: int | str
    choices: tuple[str, ...] = ()
    is_chat: bool = False
    max_tokens: int = _MAX_TOKENS
    stop: tuple[str, ...] = ("\n",)
    line: int = 0


@dataclass(frozen=True)
class Score:
    """A mean over questions, `value`, and its standard error; None: it is not known."""

    name: str
    value: float
    num_questions: int
    error: float | None

    @classmethod
    def of_share(cls, name: str, num_right: int, num_questions: int) -> "Score":
        """The share of questions that are answered right."""
        value = num_right / num_questions
        return cls(name, value, num_questions, math.sqrt(value * (1 - value) / max(1, num_questions - 1)))


def read_task(path: Path) -> list[Question]:
    """The questions in a file. Raises ConfigError if it cannot be read, and DataError, with the lines, if some cannot be used or
    there is none."""
    try:
        lines = read_text(path, _MAX_BYTES).splitlines()
    except Unreadable as error:
        raise ConfigError(f"cannot read the task {path}: {error}.") from None
    found = [(number, _question(line)) for number, line in enumerate(lines, 1) if line.strip()]
    problems = [f"line {number}: {entry}" for number, entry in found if isinstance(entry, str)]
    if problems or not found:
        raise DataError(f"cannot read the task {path}:\n  " + (first_lines(problems) or "it has no line"))
    return [replace(entry, line=number) for number, entry in found if isinstance(entry, Question)]


def check_task(assistant: Assistant, questions: Sequence[Question], name: str = "the task") -> None:
    """Raise DataError, with the lines, if questions cannot be asked: they are too long for a row, or have no tokens."""
    found = ((question.line, _problem(assistant, question)) for question in questions)
    problems = [f"line {line}: {problem}" for line, problem in found if problem is not None]
    if problems:
        raise DataError(f"cannot evaluate on {name}:\n  " + first_lines(problems))


def _problem(assistant: Assistant, question: Question) -> str | None:
    """Why a question cannot be asked, if so."""
    length = assistant.engine.runner.sizes.length
    try:
        if question.choices:
            count = max(len(_split_tokens(assistant, question.prompt, choice)[0]) for choice in question.choices)
            what, most = "the prompt and its longest choice have", length
        elif question.is_chat:
            count = len(assistant.render([{"role": "user", "content": question.prompt}]))
            what, most = "the conversation has", length - 1
        else:
            count = len(assistant.tokenizer.encode(question.prompt, add_special_tokens=True))
            what, most = "the prompt has", length - 1
            if count == 0 and assistant.tokenizer.bos_id is None and assistant.tokenizer.eos_id is None:
                return "the prompt has no token, and the tokenizer none that begins a text"
    except MparError as error:
        return str(error)
    return f"{what} {count:,} tokens, and {most:,} fit (length=)" if count > most else None


def score_task(
    assistant: Assistant, questions: Sequence[Question], progress: Callable[[int], None] = lambda done: None
) -> list[Score]:
    """The shares of questions that are answered right. `progress` is called with the number of those that are done. Raises as
    `check_task`.

    accuracy:    the right choice has the largest log-probability. accuracy_by_byte: the largest one divided by its bytes.
    exact_match: the answer is the right text, apart from white space around it.
    """
    check_task(assistant, questions)
    chosen = [question for question in questions if question.choices]
    asked = [question for question in questions if not question.choices]
    right = {"accuracy": 0, "accuracy_by_byte": 0}
    for done, question in enumerate(chosen, 1):
        scores = [continuation_logprob(assistant, question.prompt, choice)[0] for choice in question.choices]
        by_byte = [score / max(1, len(choice.encode())) for score, choice in zip(scores, question.choices, strict=True)]
        right["accuracy"] += _largest(scores) == question.answer
        right["accuracy_by_byte"] += _largest(by_byte) == question.answer
        progress(done)
    scores_of = [Score.of_share(name, count, len(chosen)) for name, count in right.items() if chosen]
    if asked:
        scores_of.append(Score.of_share("exact_match", _num_exact(assistant, asked, len(chosen), progress), len(asked)))
    return scores_of


def continuation_logprob(assistant: Assistant, context: str, continuation: str) -> tuple[float, bool]:
    """The log-probability of `continuation` behind `context`, and whether each of its tokens is the likeliest one.

    As in lm-evaluation-harness, what does not fit is cut off at the beginning, white space at the end of the context belongs to
    the continuation, and the tokens of the latter are those that the whole text has behind the tokens of the context.
    """
    whole, begin = _split_tokens(assistant, context, continuation)
    length = assistant.engine.runner.sizes.length
    kept = whole[-length:]
    scored = assistant.score(kept, 1)[max(1, begin - (len(whole) - len(kept))) :]
    return sum(one.logprob or 0.0 for one in scored), all(one.alternatives[0][0] == one.token for one in scored)


def _split_tokens(assistant: Assistant, context: str, continuation: str) -> tuple[list[int], int]:
    """The tokens of both texts together, and where those of the continuation begin."""
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    tokenizer = assistant.tokenizer
    whole = tokenizer.encode(context + continuation, add_special_tokens=True)
    begin = len(tokenizer.encode(context, add_special_tokens=True)) if context else 0
    if begin == 0:
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first is None:
            raise DataError("cannot score a text without a context: the tokenizer has no token that begins one.")
        whole, begin = ([first, *whole], 1) if whole[:1] != [first] else (whole, 1)
    return whole, begin


def _num_exact(assistant: Assistant, asked: Sequence[Question], num_before: int, progress: Callable[[int], None]) -> int:
    """How many questions are answered with exactly the right text; many are answered at the same time."""
    answers = []
    for question in asked:
        sampling = Sampling(max_tokens=question.max_tokens, stop=question.stop)
        if question.is_chat:
            answers.append(assistant.reply([{"role": "user", "content": question.prompt}], sampling))
        else:
            answers.append(assistant.continue_text(question.prompt, sampling))
    done = num_before
    for answer in assistant.run():
        done += answer.request.finish is not None
        progress(done)
    return sum(a.text.strip() == str(q.answer).strip() for a, q in zip(answers, asked, strict=True))


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _question(line: str) -> Question | str:
    """The question of a line, or what is wrong with it."""
    try:
        value = json.loads(line)
    except ValueError as error:
        return f"it is no JSON: {error}"
    if not isinstance(value, Mapping) or not isinstance(value.get("prompt"), str):
        return "it is no object with a text `prompt`"
    choices, answer = value.get("choices"), value.get("answer")
    if choices is not None:
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            return f"choices must be two texts or more, none of them empty: {brief(choices)}"
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            return f"answer must be the index of one of {len(choices)} choices: {brief(answer)}"
        return Question(value["prompt"], answer, tuple(choices))
    stop, count = value.get("stop"), value.get("max_tokens", _MAX_TOKENS)
    is_chat = value.get("chat", False)
    stops = ([] if is_chat else ["\n"]) if stop is None else stop
    if not isinstance(answer, str) or not answer.strip():
        wrong = f"answer must be a text that is not empty: {brief(answer)}"
        return "it has no choices, and no `answer`, the right text" if answer is None else wrong
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        return f"stop must be a list of texts: {brief(stop)}"
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or not isinstance(is_chat, bool):
        return f"max_tokens must be a positive number, and chat true or false: {brief(count)}, {brief(is_chat)}"
    return Question(value["prompt"], answer, (), is_chat, count, tuple(stops))
