"""Conversations: the columns of a row tell which format it has."""

from collections.abc import Callable, Mapping

from mpar.data._template import Message
from mpar.data.rows._message import Media, message_of, parsed, sharegpt
from mpar.data.rows._row import RowFault
from mpar.errors import brief

__all__ = ["COLUMNS", "asked_before", "conversation", "keys_of", "list_of_messages", "refuse_media", "tools_of", "with_system"]

COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "query", "response", "question",
    "answer", "problem", "solution", "history", "system", "tools", "text", "chosen", "rejected", "rejected_response",
    "rejected_messages", "label", "margin", "completions", "labels",
)  # fmt: skip
"""The columns that formats have."""
_FORMATS = (
    "messages, conversations, prompt + completion, instruction + output, query + response (also question + answer, "
    "problem + solution)"
)
_QUESTIONS = ("query", "question", "problem")
_ANSWERS = ("response", "answer", "solution")


def conversation(value: Mapping[str, object]) -> tuple[str, tuple[Message, ...], tuple[object, ...] | None]:
    """(the name of the format, the messages, the tools) of a row. Raises RowFault, or Media if it is not about text alone."""
    refuse_media(value)
    name, read = _format(value)
    messages = read(value) if name == "messages" else with_system(value, read(value))
    tools = tools_of(value)
    checked = tuple(message_of(i, message) for i, message in enumerate(messages))
    if all(message["role"] != "assistant" for message in checked):
        raise RowFault("no assistant message")
    return name, checked, tools


def with_system(value: Mapping[str, object], messages: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Messages behind the system message that a column of the row has, if it has one."""
    system = value.get("system") or value.get("system_prompt")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def tools_of(value: Mapping[str, object]) -> tuple[object, ...] | None:
    """The tools of a row. Raises RowFault."""
    tools = parsed(value.get("tools"))
    tools = [tools] if isinstance(tools, dict) else tools
    if tools is not None and not isinstance(tools, list):
        raise RowFault(f"'tools' is a {type(tools).__name__}, not a list")
    return tuple(tools) if tools else None


def asked_before(value: Mapping[str, object]) -> list[Mapping[str, object]] | None:
    """What was asked, of a row whose answers stand in columns of their own; None if they begin with it. Raises RowFault."""
    for key in ("messages", "conversations", "conversation"):
        if value.get(key):
            return list_of_messages(value, key)
    if "prompt" in value and value["prompt"] not in (None, ""):
        prompt = parsed(value["prompt"])
        return list_of_messages(value, "prompt") if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if value.get("instruction"):
        return _alpaca({**value, "output": ""})[:1]
    question = next((key for key in _QUESTIONS if value.get(key)), None)
    return None if question is None else _question_answer({**value, "": ""}, question, "")[:-1]


def list_of_messages(value: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    """A column that is a list of messages, in the words of OpenAI or of ShareGPT. Raises RowFault."""
    return sharegpt(_list_of_objects(value, key))


def refuse_media(value: Mapping[str, object]) -> None:
    """Raise Media for a row that is not about text alone."""
    for key in ("images", "image", "videos", "video", "audios", "audio"):
        if value.get(key):
            raise Media


def keys_of(value: Mapping[str, object]) -> str:
    """The names of columns, as an error shows them."""
    return brief(sorted(value)[:8])


def _format(value: Mapping[str, object]) -> tuple[str, Callable[[Mapping[str, object]], list[Mapping[str, object]]]]:
    filled = {key for key, item in value.items() if item not in ("", None)}  # in tables, rows have the columns of all rows
    if "messages" in filled:
        return "messages", _messages
    if filled & {"conversations", "conversation"}:
        return "conversations", _conversations
    if filled & {"chosen", "rejected"}:
        raise RowFault(
            "a pair of a preferred and a rejected answer: task.kind=preference reads it; data.columns={chosen: messages} trains "
            "on the preferred one"
        )
    if "prompt" in filled and "completion" in value:
        if "label" in filled:
            raise RowFault(
                "an answer with a label (KTO), of which task=sft cannot tell whether to learn it: task.kind=kto reads it"
            )
        return "prompt/completion", _prompt_completion
    if "instruction" in filled:
        return "instruction/output", _alpaca
    questions = [key for key in _QUESTIONS if key in filled] or [key for key in _QUESTIONS if key in value]
    answers = [key for key in _ANSWERS if key in filled] or [key for key in _ANSWERS if key in value]
    if len(questions) <= 1 and len(answers) <= 1 and (questions or answers):
        question, answer = (questions or [_QUESTIONS[0]])[0], (answers or [_ANSWERS[0]])[0]
        return f"{question}/{answer}", lambda row: _question_answer(row, question, answer)
    raise RowFault(
        f"no known format: its columns are {keys_of(value)}; known are {_FORMATS}. data.columns maps other names to these"
    )


def _messages(value: Mapping[str, object]) -> list[Mapping[str, object]]:
    return _list_of_objects(value, "messages")


def _conversations(value: Mapping[str, object]) -> list[Mapping[str, object]]:
    return sharegpt(_list_of_objects(value, "conversations" if "conversations" in value else "conversation"))


def _prompt_completion(value: Mapping[str, object]) -> list[Mapping[str, object]]:
    prompt, completion = parsed(value["prompt"]), parsed(value["completion"])
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": value["prompt"]}]
    answered = completion if isinstance(completion, list) else [{"role": "assistant", "content": value["completion"]}]
    if not all(isinstance(message, dict) for message in (*asked, *answered)):
        raise RowFault("'prompt' or 'completion' is a list of something else than messages")
    return [*asked, *answered]


def _question_answer(value: Mapping[str, object], question: str, answer: str) -> list[Mapping[str, object]]:
    pairs = parsed(value.get("history")) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowFault("'history' is not a list of [query, response]")
    if question not in value or answer not in value:
        raise RowFault(f"no {question if question not in value else answer}")
    turns = [*pairs, (value[question], value[answer])]
    return [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]


def _alpaca(value: Mapping[str, object]) -> list[Mapping[str, object]]:
    instruction, extra = value.get("instruction"), value.get("input")
    if "output" not in value:
        raise RowFault("no output")
    if extra and isinstance(instruction, str) and isinstance(extra, str):
        instruction = f"{instruction}\n{extra}"
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": value["output"]}]


def _list_of_objects(value: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    items = parsed(value[key])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items) or not items:
        raise RowFault(f"'{key}' is not a list of objects with at least one")
    return items
