"""Assistant: an engine with a tokenizer. It takes texts and conversations, and gives the text of answers while it comes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.data import Tokenizer, conversation
from mpar.errors import ConfigError, DataError, NumericsError
from mpar.infer._choose import Chosen
from mpar.infer._engine import Engine, Runner
from mpar.infer._grammar import Grammar, Grammars
from mpar.infer._request import Request
from mpar.infer._sampling import MAX_ALTERNATIVES, Sampling
from mpar.infer._text import TextStream

__all__ = ["Answer", "Assistant"]


@dataclass(eq=False)
class Answer:
    """An answer while it comes.

    stream: its text. pending: what of the text is certain and was not given out yet. grammar: what it must be, if that is given.
    """

    request: Request
    stream: TextStream
    pending: str = ""
    grammar: Grammar | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return self.stream.text

    def take(self) -> str:
        """The text that has become certain since the last time."""
        pending, self.pending = self.pending, ""
        return pending


class Assistant:
    """Answers texts and conversations with the model of a runner. `eos_ids`: tokens that end answers, besides the tokenizer's."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, eos_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        ends = dict.fromkeys([*eos_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])])
        self.engine = Engine(runner, eos_ids=tuple(ends), stopped=self._push, allowed=self._allowed)
        self._grammars = Grammars(tokenizer, runner.vocab_size, tuple(ends))
        self._answers: dict[Request, Answer] = {}

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self.engine.runner.vocab_size

    @property
    def is_idle(self) -> bool:
        """Whether all answers have ended."""
        return self.engine.is_idle

    def continue_text(self, text: str, sampling: Sampling, choice: int = 0, adapter: str | None = None) -> Answer:
        """An answer that goes on from a text, to which the tokenizer adds its special tokens. An empty text begins with the first
        of these; raises ConfigError if there is none, or if the text is too long. adapter: see `Engine.add`."""
        tokens = self.tokenizer.encode(text, add_special_tokens=True)
        first = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if not tokens and first is not None:
            tokens = [first]
        if not tokens:
            raise ConfigError("cannot continue an empty text: the tokenizer has no token that begins one. Give some text.")
        return self.continue_tokens(tokens, sampling, choice, adapter)

    def reply(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling: Sampling,
        choice: int = 0,
        tools: Sequence[object] | None = None,
        adapter: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Answer:
        """The assistant's answer to a conversation. Raises as `render`. adapter: see `Engine.add`."""
        return self.continue_tokens(self.render(messages, tools, variables), sampling, choice, adapter)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, rendered as in training, up to where the assistant's answer begins.
        variables: see `ChatTemplate.render`.

        Raises DataError if a message cannot be used, or if the template would leave the tools out, and the model would answer as
        if there were none; TemplateError or RenderError as `Tokenizer.apply_chat_template`.
        """
        template = self.tokenizer.template
        if tools and template is not None and not template.reads_tools:
            raise DataError(
                f"tools cannot be called: {template.name} shows none to the model. Leave them out, or take a model whose "
                "template reads tools"
            )
        said = conversation(messages)
        return self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tools=tools or None, variables=variables)

    def continue_tokens(
        self, tokens: Sequence[int], sampling: Sampling, choice: int = 0, adapter: str | None = None
    ) -> Answer:
        """An answer that goes on from tokens. Raises ConfigError if there are none or too many, or as `check_schema`.
        adapter: see `Engine.add`."""
        grammar = None if sampling.schema is None else self._grammars.begin(sampling.schema)
        request = self.engine.add(tokens, sampling, choice, adapter)
        answer = Answer(request, TextStream(self._decode, sampling.stop, tokens, sampling.min_tokens), grammar=grammar)
        self._answers[request] = answer
        return answer

    def check_schema(self, schema: str) -> None:
        """Raise ConfigError if no answer can be made by this JSON Schema."""
        self._grammars.begin(schema)

    def cancel(self, answer: Answer) -> None:
        """Give up an answer that has not ended yet."""
        self.engine.cancel(answer.request)
        self._answers.pop(answer.request, None)

    def step(self) -> list[Answer]:
        """Run one step; returns the answers that have become longer or have ended."""
        grown = [self._answers[request] for request in self.engine.step()]
        for answer in grown:
            if answer.request.finish is not None:
                answer.pending += answer.stream.finish()
                del self._answers[answer.request]
        return grown

    def run(self) -> Iterator[Answer]:
        """Run steps until all answers have ended; gives each answer as often as it has become longer. Raises NumericsError if one
        cannot be made."""
        while not self.is_idle:
            for answer in self.step():
                answer.request.check()
                yield answer

    def answer(self, questions: Sequence[str], sampling: Sampling) -> list[str]:
        """The answers to questions, each of which is asked by itself."""
        answers = [self.reply([{"role": "user", "content": question}], sampling) for question in questions]
        for _ in self.run():
            pass
        return [answer.text.strip() for answer in answers]

    def score(self, tokens: Sequence[int], num_alternatives: int = 0, adapter: str | None = None) -> list[Chosen]:
        """The tokens of a text with their log-probabilities behind those before them, which the first one does not have.
        adapter: see `Engine.add`. Raises NumericsError if they are no finite numbers."""
        if len(tokens) < 2:
            return [Chosen(token) for token in tokens]
        number = self.engine.number_of(adapter)
        count = MAX_ALTERNATIVES if num_alternatives > 1 else 1
        (scores,) = self.engine.runner.scores([torch.tensor(tokens)], count, number)
        likeliest = zip(scores.likeliest_SK.tolist(), scores.likeliest_logprobs_SK.tolist(), strict=True)
        pairs = [tuple(zip(ids, values, strict=True))[:num_alternatives] for ids, values in likeliest]
        if not scores.logprobs_S.isfinite().all():
            raise NumericsError(f"cannot score a text of {len(tokens)} tokens: log-probabilities are no finite numbers.")
        chosen = zip(tokens[1:], scores.logprobs_S.tolist(), pairs, strict=True)
        return [Chosen(tokens[0]), *(Chosen(token, logprob, alternatives) for token, logprob, alternatives in chosen)]

    def _push(self, request: Request) -> str | None:
        """Give the newest token to the text of its answer; returns the stop text that it completes, an empty one if the grammar
        permits nothing more."""
        answer = self._answers[request]
        answer.pending += answer.stream.push(request.tokens[-1])
        if answer.grammar is not None:
            answer.grammar.accept(request.tokens[-1])
            if answer.stream.stopped_by is None and answer.grammar.is_complete:
                return ""
        return answer.stream.stopped_by

    def _allowed(self, request: Request) -> Tensor | None:
        grammar = self._answers[request].grammar
        return None if grammar is None else grammar.allowed()

    def _decode(self, tokens: Sequence[int]) -> str:
        size = self.tokenizer.vocab_size  # that of the model may be larger
        return self.tokenizer.decode([token for token in tokens if token < size], skip_special_tokens=True)
