"""One message of a conversation, in the forms of OpenAI, ShareGPT and ms-swift."""

from collections.abc import Mapping, Sequence

from mpar.data._template import Message
from mpar.data.rows._row import RowFault
from mpar.errors import DataError, brief
from mpar.files import ROW_DECODER

__all__ = ["Media", "check_unicode", "conversation", "message_of", "parsed", "sharegpt"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "observations": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool-response": "tool",
    "function-response": "tool",
    "function_call": "tool_call",
    "function-call": "tool_call",
    "tool-call": "tool_call",
}
"""What other formats call the roles; all others have the same name everywhere."""


class Media(Exception):
    """The row has images, sound or video."""


def parsed(value: object) -> object:
    """The value of a text that is JSON of a list or object, as tables without lists hold them; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return ROW_DECODER.decode(value)
        except (ValueError, RecursionError):
            return value
    return value


def sharegpt(turns: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Turns with `from` and `value`, or `role` and `content`, as messages. What else a turn has is kept."""
    out: list[Mapping[str, object]] = []
    for turn in turns:
        others = {key: item for key, item in turn.items() if key not in ("from", "value")}
        out.append({**others, "role": turn.get("from", turn.get("role")), "content": turn.get("value", turn.get("content"))})
    return out


def conversation(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages as the chat template gets those of a row in training: contents are texts, arguments of calls are objects. Raises
    DataError with the number of a message, from 0 on, that cannot be used."""
    found = []
    for i, message in enumerate(messages):
        try:
            found.append(message_of(i, message))
        except RowFault as fault:
            raise DataError(str(fault)) from None
        except Media:
            raise DataError(f"message {i} has parts that are no text; images, sound and video are not supported") from None
    return found


def message_of(i: int, message: Mapping[str, object]) -> Message:
    """Message number `i` of a row, checked, with a content that is a text. Raises RowFault, or Media."""
    given = message.get("role")
    role = _SHAREGPT_ROLES.get(given, given) if isinstance(given, str) else given
    content = message.get("content")
    if role == "tool_call":
        return _tool_call(i, message)
    if role not in _ROLES:
        raise RowFault(f"message {i} has role {brief(given)}; known are {', '.join(_ROLES)}")
    if message.get("tool_calls"):
        calls = parsed(message["tool_calls"])
        if role != "assistant" or not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise RowFault(f"message {i} has 'tool_calls' that are no list of named functions, or is not of the assistant")
        message = {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}
        content = "" if content is None else content
    if isinstance(content, list):
        content = _text_of_blocks(i, content)
    if not isinstance(content, str):
        raise RowFault(f"message {i} has content of type {type(content).__name__}, not a string")
    check_unicode(content)
    return {**message, **_weights(i, message), "role": role, "content": content}


def check_unicode(text: str) -> None:
    """Raise RowFault for a text with half a surrogate pair, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowFault(f"half a surrogate pair at character {error.start}") from error


def _tool_call(i: int, message: Mapping[str, object]) -> Message:
    """A turn whose content is JSON of one call, or of a list of calls: what the assistant writes to call tools."""
    value = parsed(message.get("content"))
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowFault(f"message {i} calls a tool, and its content is not JSON with a name and arguments")
    functions = [{"type": "function", "function": _with_parsed_arguments(call)} for call in calls if isinstance(call, dict)]
    kept = {key: item for key, item in message.items() if key not in ("role", "content")}
    return {**kept, "role": "assistant", "content": "", "tool_calls": functions}


def _is_call(call: object) -> bool:
    """Whether this is OpenAI's object of a call, or its function alone."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _with_parsed_arguments(call: Mapping[str, object]) -> dict[str, object]:
    """A call whose arguments are an object: OpenAI writes them as JSON in a text, and templates want the object."""
    call, function = dict(call), call.get("function")
    if isinstance(function, dict):
        call["function"] = _with_parsed_arguments(function)
    if "arguments" in call:
        call["arguments"] = parsed(call["arguments"])
    return call


def _weights(i: int, message: Mapping[str, object]) -> dict[str, object]:
    """What the message says about its weight in the loss, checked."""
    given = {key: parsed(message[key]) for key in ("loss", "weight", "loss_scale", "weights") if message.get(key) is not None}
    if not isinstance(given.get("loss", True), bool):
        raise RowFault(f"message {i} has 'loss' {brief(given['loss'])}, neither true nor false")
    for key in ("weight", "loss_scale"):
        if not _is_weight(given.get(key, 1)):
            raise RowFault(f"message {i} has '{key}' {brief(given[key])}, not a number from 0 on")
    ranges = given.get("weights", [])
    if not isinstance(ranges, list) or not all(_is_range(item) for item in ranges):
        raise RowFault(
            f"message {i} has 'weights' {brief(ranges)}, not a list of [begin, end, weight] for characters of its content"
        )
    return given


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_range(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(type(bound) is int for bound in value[:2]):
        return False
    return bool(0 <= value[0] < value[1]) and _is_weight(value[2])


def _text_of_blocks(i: int, blocks: list[object]) -> str:
    """The text of a content that is a list of blocks. Raises Media for a block that is no text."""
    texts = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, dict) and isinstance(block.get("text"), str) and block.get("type", "text") == "text":
            texts.append(block["text"])
        elif isinstance(block, dict) and isinstance(block.get("type"), str) and block["type"] != "text":
            raise Media
        else:
            raise RowFault(f"message {i} has a block of content that is {brief(block)}, neither a text nor known media")
    return "".join(texts)
