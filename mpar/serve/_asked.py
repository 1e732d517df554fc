"""Asked: what the body of a request asks for. Every field that is known is checked; one that cannot be honoured is refused."""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpar.errors import ConfigError, brief
from mpar.infer import Sampling
from mpar.serve._refusal import Refusal

__all__ = ["Asked", "read_chat", "read_completion"]

_MAX_CHOICES = 128
_SEED_BITS = 63
_MAX_STOPS = 16
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Asked:
    """What is asked for.

    prompts:        texts or tokens to continue; of a conversation one None.
    messages:       the conversation; tools: the functions that the assistant may call in it.
    template_variables: what the chat template reads besides, such as `enable_thinking`.
    echo:           the text of the prompt is part of the answer. only_prompts: it is all of it.
    with_usage:     a stream ends with the counts of tokens.
    """

    model: str | None
    prompts: Sequence[str | Sequence[int] | None]
    sampling: Sampling
    num_choices: int
    streams: bool
    with_usage: bool
    messages: Sequence[Mapping[str, object]] = ()
    tools: Sequence[Mapping[str, object]] | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict)
    echo: bool = False
    only_prompts: bool = False


_NUMBER, _COUNT, _SWITCH, _TEXT, _OBJECT = "a number", "a whole number", "true or false", "a text", "an object"
_KINDS: Mapping[str, Callable[[object], bool]] = {
    _NUMBER: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    _COUNT: lambda value: isinstance(value, int) and not isinstance(value, bool),
    _SWITCH: lambda value: isinstance(value, bool),
    _TEXT: lambda value: isinstance(value, str),
    _OBJECT: lambda value: isinstance(value, dict),
}
_PLAIN = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "top_k": _COUNT,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _COUNT,
    "ignore_eos": _SWITCH,
    "min_tokens": _COUNT,
}
"""Fields of a `Sampling` that have its names in a request."""
_READ = {
    *(*_PLAIN, "model", "prompt", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "logprobs"),
    *("top_logprobs", "echo", "n", "stream", "stream_options", "stop", "stop_token_ids", "response_format", "logit_bias"),
    "chat_template_kwargs",
}
_ABOUT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("request_id", "priority", "cache_salt"),
}
"""Fields that change no answer."""
_NOT_DONE = {
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "parallel_tool_calls": (True,),
    "length_penalty": (1,),
    "typical_p": (1,),
}
"""Fields that change an answer in ways that are not there yet, with the values, besides null, that change nothing."""
_OF_CHAT = {"messages", "tools", "tool_choice", "top_logprobs", "chat_template_kwargs"}
_OF_TEXTS = {"prompt", "echo"}
_NOTHING: Sequence[object] = (None, False, [], {}, "", "none", "auto")
"""Values with which a field of the other kind of requests asks for nothing."""


def read_chat(body: object, defaults: Sampling) -> Asked:
    """What a body for /v1/chat/completions asks for. Raises Refusal with the field that is wrong."""
    fields = _object(body, _OF_TEXTS, "/v1/completions")
    messages, tools, choice = fields.get("messages"), fields.get("tools"), fields.get("tool_choice")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise _wrong("messages", "must be a list with at least one message, which is an object with a role and a content")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _wrong("tools", "must be a list of objects")
    if choice not in (None, "none", "auto"):
        raise _wrong("tool_choice", f"is {brief(choice)}; only none and auto are there")
    limit = _limit(fields)
    sampling = _sampling(fields, defaults, limit, fields.get(limit))
    if _field(fields, "logprobs", _SWITCH, False):
        alternatives = _field(fields, "top_logprobs", _COUNT, 0)
        sampling = _checked(sampling, "top_logprobs", num_alternatives=alternatives)
    elif fields.get("top_logprobs"):
        raise _wrong("top_logprobs", "needs logprobs=true")
    variables = _field(fields, "chat_template_kwargs", _OBJECT, {})
    shown = None if choice == "none" else tools or None
    return replace(_asked(fields, [None], sampling), messages=messages, tools=shown, template_variables=variables)


def read_completion(body: object, defaults: Sampling) -> Asked:
    """What a body for /v1/completions asks for. Raises Refusal with the field that is wrong."""
    fields = _object(body, _OF_CHAT, "/v1/chat/completions")
    prompt = fields.get("prompt", "")
    prompts = prompt if isinstance(prompt, list) and not _is_tokens(prompt) else [prompt]
    if not prompts or not all(isinstance(item, str) or (isinstance(item, list) and _is_tokens(item)) for item in prompts):
        raise _wrong("prompt", "must be a text, a list of tokens, or a list of these")
    echo, limit = _field(fields, "echo", _SWITCH, False), _limit(fields)
    most = fields.get(limit, 16)
    only_prompts = echo and most == 0 and _KINDS[_COUNT](most)
    sampling = _sampling(fields, defaults, limit, None if only_prompts else most)
    if fields.get("logprobs") is not None:
        sampling = _checked(sampling, "logprobs", num_alternatives=_field(fields, "logprobs", _COUNT, 0))
    return replace(_asked(fields, prompts, sampling), echo=echo, only_prompts=only_prompts)


def _limit(fields: Mapping[str, Any]) -> str:
    """The field that says how many tokens an answer may have; clients send the newer one to both routes."""
    return "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"


def _is_tokens(value: Sequence[object]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _object(body: object, others: Collection[str], route: str) -> Mapping[str, Any]:
    """The fields of the body, none of which asks for what is not there, nor is one of `others`, which are for `route`."""
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, and is {brief(body)}")
    for name, value in body.items():
        if name in others and value not in _NOTHING:
            raise _wrong(name, f"is a field of requests to {route}")
        if value is not None and name not in _READ and name not in _ABOUT and not _is_one_of(value, _NOT_DONE.get(name, ())):
            raise _wrong(name, f"={brief(value)} is not supported")
    return body


def _is_one_of(value: object, values: Sequence[object]) -> bool:
    """The same by ==, but true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _asked(fields: Mapping[str, Any], prompts: Sequence[str | Sequence[int] | None], sampling: Sampling) -> Asked:
    """What both kinds of requests have in common."""
    num_choices, streams = _field(fields, "n", _COUNT, 1), _field(fields, "stream", _SWITCH, False)
    if not 1 <= num_choices <= _MAX_CHOICES:
        raise _wrong("n", f"must be between 1 and {_MAX_CHOICES}")
    options = _field(fields, "stream_options", _OBJECT, {})
    if options and not streams:
        raise _wrong("stream_options", "needs stream=true")
    with_usage = options.get("include_usage") or False
    if not isinstance(with_usage, bool):
        raise _wrong("stream_options.include_usage", f"must be {_SWITCH}, and is {brief(with_usage)}")
    return Asked(_field(fields, "model", _TEXT, None), prompts, sampling, num_choices, streams, with_usage)


def _sampling(fields: Mapping[str, Any], defaults: Sampling, limit: str, max_tokens: object) -> Sampling:
    """How tokens are chosen: `defaults` with what the request says. limit: the field that says `max_tokens`."""
    sampling = replace(defaults, seed=secrets.randbits(_SEED_BITS))  # two requests that name no seed draw unlike answers
    for name, kind in _PLAIN.items():
        if fields.get(name) is not None:
            value = _field(fields, name, kind, None)
            sampling = _checked(sampling, name, **{name: max(value, 0) if name == "top_k" else value})  # -1 is no limit, too
    if max_tokens is not None:
        if not _KINDS[_COUNT](max_tokens):
            raise _wrong(limit, f"must be {_COUNT}, and is {brief(max_tokens)}")
        sampling = _checked(sampling, limit, max_tokens=max_tokens)
    stop, ids = ([] if fields.get(name) is None else fields[name] for name in ("stop", "stop_token_ids"))
    stops = ([stop] if stop else []) if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(item, str) for item in stops):
        raise _wrong("stop", f"must be a text or a list of at most {_MAX_STOPS} texts")
    if not isinstance(ids, list) or (ids and not _is_tokens(ids)):
        raise _wrong("stop_token_ids", "must be a list of tokens")
    sampling = _checked(_checked(sampling, "stop", stop=tuple(stops)), "stop_token_ids", stop_ids=tuple(ids))
    sampling = _checked(sampling, "response_format", schema=_schema(fields.get("response_format")))
    return _checked(sampling, "logit_bias", bias=_bias(_field(fields, "logit_bias", _OBJECT, {})))


def _schema(value: object) -> str | None:
    """The JSON Schema that `response_format` asks for; None for any text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise _wrong("response_format", "must be an object whose type is text, json_object or json_schema")
    if kind != "json_schema":
        return _ANY_OBJECT if kind == "json_object" else None
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise _wrong("response_format.json_schema", "must be an object with a schema")
    return json.dumps(named["schema"])


def _bias(value: Mapping[str, Any]) -> dict[int, float]:
    if not all(_KINDS[_NUMBER](number) for number in value.values()):
        raise _wrong("logit_bias", "must be an object from tokens to numbers")
    try:
        bias = {int(token): float(number) for token, number in value.items()}
        if [str(token) for token in bias] != list(value):  # int() takes " 1", "1_0" and digits of other scripts, too
            raise ValueError
    except (ValueError, OverflowError):
        raise _wrong("logit_bias", "must be an object from tokens to numbers") from None
    if not all(-100 <= number <= 100 for number in bias.values()):
        raise _wrong("logit_bias", "must have numbers between -100 and 100")
    return bias


def _field(fields: Mapping[str, Any], name: str, kind: str, default: Any) -> Any:
    """The value of a field, the default if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return default
    if not _KINDS[kind](value):
        raise _wrong(name, f"must be {kind}, and is {brief(value)}")
    return value


def _checked(sampling: Sampling, name: str, **values: Any) -> Sampling:
    try:
        return replace(sampling, **values)
    except ConfigError as error:
        raise _wrong(name, str(error).rpartition("\n  ")[2].partition(": it ")[2]) from None


def _wrong(name: str, problem: str) -> Refusal:
    return Refusal(400, f"{name} {problem}" if not problem.startswith("=") else name + problem, name)
