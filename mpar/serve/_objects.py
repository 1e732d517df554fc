"""Objects: the JSON objects of OpenAI's interface, made of what has come for the choices of a job."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpar.data import Tokenizer
from mpar.infer import Chosen
from mpar.serve._asked import Asked
from mpar.serve._message import MessageParser, Part
from mpar.serve._worker import Grown, Job

__all__ = ["Reply"]


@dataclass
class _Choice:
    """What has come for one choice so far.

    parts:  one of kind content, reasoning_content or tool_call for each change of kind.
    offset: where the text of the next token begins in the whole text.
    """

    parser: MessageParser
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    prompt: Sequence[Chosen] = ()
    chosen: list[Chosen] = field(default_factory=list)
    finish: str | None = None
    num_calls: int = 0
    offset: int = 0


class Reply:
    """The answer to one request, as one object or as the chunks of a stream.

    chat:   whether it is a chat completion, with messages in place of texts.
    thinks: whether the prompt ends with the beginning of thoughts.
    """

    def __init__(self, asked: Asked, job: Job, model: str, tokenizer: Tokenizer, *, chat: bool, thinks: bool = False) -> None:
        self.asked, self.job, self.tokenizer, self.chat = asked, job, tokenizer, chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._kind, self._chunk_kind = kind, f"{kind}.chunk" if chat else kind
        count = len(job.prompts) * job.num_choices
        self.choices = [_Choice(MessageParser(thinks=thinks, calls=asked.tools is not None)) for _ in range(count)]
        self._begun: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    def take(self, grown: Grown) -> list[Mapping[str, object]]:
        """Take what has come; returns the chunks of a stream that say it."""
        choice = self.choices[grown.index]
        if grown.prompt:
            choice.prompt = grown.prompt
            return []
        choice.text += grown.text
        choice.chosen += grown.chosen
        ends = grown.finish is not None
        if not self.chat:
            choice.finish = grown.finish
            return self._text_chunks(grown, choice) if self.asked.streams else []
        parts = choice.parser.push(grown.text, at_end=ends)
        choice.parts += parts
        choice.num_calls += sum(part.kind == "tool_call" for part in parts)
        if ends:
            choice.finish = "tool_calls" if choice.num_calls and grown.finish == "stop" else grown.finish
        return self._chat_chunks(grown, choice, parts) if self.asked.streams else []

    def complete(self) -> Mapping[str, object]:
        """The answer as one object."""
        choices = [self._message(i) if self.chat else self._text(i) for i in range(len(self.choices))]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> Mapping[str, object]:
        """The counts of tokens."""
        prompt = sum(len(tokens) for tokens in self.job.prompts)
        answer = sum(len(choice.chosen) for choice in self.choices)
        details = {"cached_tokens": self.job.num_shared}
        counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {**counts, "prompt_tokens_details": details}

    def usage_chunk(self) -> Mapping[str, object]:
        """The last chunk of a stream that ends with the counts of tokens."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def _chunk(self, index: int, body: Mapping[str, object]) -> Mapping[str, object]:
        usage = {"usage": None} if self.asked.with_usage else {}
        return {**self._head, "object": self._chunk_kind, "choices": [{"index": index, **body}], **usage}

    def _text_chunks(self, grown: Grown, choice: _Choice) -> list[Mapping[str, object]]:
        """A chunk with what has come of a text; none while nothing of it can be seen."""
        echoed, scored = "", grown.chosen
        if grown.index not in self._begun:
            self._begun.add(grown.index)
            echoed, scored = self._echoed(grown.index), [*choice.prompt, *grown.chosen]
            choice.offset = 0 if choice.prompt else len(echoed)
        logprobs = self._text_logprobs(scored, choice.offset)
        if logprobs is not None:
            choice.offset += sum(len(self._decode([one.token])) for one in scored)
        body = {"text": echoed + grown.text, "logprobs": logprobs, "finish_reason": grown.finish}
        return [self._chunk(grown.index, body)] if body["text"] or logprobs or choice.finish else []

    def _chat_chunks(self, grown: Grown, choice: _Choice, parts: Sequence[Part]) -> list[Mapping[str, object]]:
        """Chunks with one change each: the role, then parts of the message, then why it ended."""
        deltas: list[Mapping[str, object]] = []
        if grown.index not in self._begun:
            self._begun.add(grown.index)
            deltas.append({"role": "assistant", "content": ""})
        number = choice.num_calls - sum(part.kind == "tool_call" for part in parts)
        for part in parts:
            if part.kind == "tool_call":
                deltas.append({"tool_calls": [{"index": number, **_call(part)}]})
                number += 1
            else:
                deltas.append({part.kind: part.text})
        logprobs = self._chat_logprobs(grown.chosen)
        if logprobs is not None and not parts:
            deltas.append({"content": ""})
        chunks = [self._chunk(grown.index, {"delta": delta, "logprobs": None, "finish_reason": None}) for delta in deltas]
        if logprobs is not None and chunks:
            last = {"delta": deltas[-1], "logprobs": logprobs, "finish_reason": None}
            chunks[-1] = self._chunk(grown.index, last)
        if choice.finish is not None:
            chunks.append(self._chunk(grown.index, {"delta": {}, "logprobs": None, "finish_reason": choice.finish}))
        return chunks

    def _message(self, index: int) -> Mapping[str, object]:
        choice = self.choices[index]
        texts = {kind: "".join(p.text for p in choice.parts if p.kind == kind) for kind in ("content", "reasoning_content")}
        calls = [_call(part) for part in choice.parts if part.kind == "tool_call"]
        message: dict[str, object] = {"role": "assistant", "content": texts["content"] or ("" if not calls else None)}
        message["refusal"] = None
        if texts["reasoning_content"]:
            message["reasoning_content"] = texts["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        logprobs = self._chat_logprobs(choice.chosen)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _text(self, index: int) -> Mapping[str, object]:
        choice, echoed = self.choices[index], self._echoed(index)
        scored = [*choice.prompt, *choice.chosen]
        logprobs = self._text_logprobs(scored, 0 if choice.prompt else len(echoed))
        return {"index": index, "text": echoed + choice.text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _echoed(self, index: int) -> str:
        """The text of the prompt, if it is a part of the answer."""
        if not self.asked.echo:
            return ""
        number = index // self.job.num_choices
        prompt = self.asked.prompts[number]
        return prompt if isinstance(prompt, str) else self._decode(self.job.prompts[number])

    def _text_logprobs(self, chosen: Sequence[Chosen], offset: int) -> Mapping[str, object] | None:
        """The log-probabilities of tokens of a text that begins `offset` characters behind the beginning of the answer."""
        if self.job.sampling.num_alternatives is None:
            return None
        offsets = []
        for one in chosen:
            offsets.append(offset)
            offset += len(self._decode([one.token]))
        alternatives = [
            None if one.logprob is None else {self._name(token): value for token, value in reversed(one.alternatives)}
            for one in chosen
        ]
        return {
            "tokens": [self._name(one.token) for one in chosen],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, chosen: Sequence[Chosen]) -> Mapping[str, object] | None:
        if self.job.sampling.num_alternatives is None:
            return None
        content = []
        for one in chosen:
            top = [self._token(token, value) for token, value in one.alternatives]
            content.append({**self._token(one.token, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; those that only the model has have none."""
        return self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.bytes_of(token) if token < self.tokenizer.vocab_size else b""

    def _token(self, token: int, logprob: float | None) -> Mapping[str, object]:
        return {"token": self._decode([token]), "logprob": logprob, "bytes": list(self._bytes(token))}

    def _name(self, token: int) -> str:
        """The text of a token, its bytes where it is a part of a character, or its number where it has neither: each token has a
        name of its own."""
        text, content = self._decode([token]), self._bytes(token)
        if not text and not content:
            return f"token_id:{token}"
        return text if text.encode() == content else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _call(part: Part) -> Mapping[str, object]:
    return {"id": part.call, "type": "function", "function": {"name": part.name, "arguments": part.text}}
