"""Messages: thoughts, content and calls, however the text is cut while it comes."""

import json
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpar.serve._message import MessageParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = {
    "content": ("just text, 1 < 2", [("content", "just text, 1 < 2")]),
    "thoughts": ("<think>\nhmm\n</think>\n\nyes", [("reasoning_content", "hmm"), ("content", "yes")]),
    "empty thoughts": ("<think>\n\n</think>\n\nyes", [("content", "yes")]),
    "call": (f"well\n{CALL}", [("content", "well\n"), ("add", '{"a": 1}')]),
    "two calls": (f"{CALL}\n{CALL}", [("add", '{"a": 1}'), ("add", '{"a": 1}')]),
    "no call": ("<tool_call>no json</tool_call>", [("content", "<tool_call>no json</tool_call>")]),
    "half a call": ('<tool_call>{"name": "add"', [("content", '<tool_call>{"name": "add"')]),
    "half a mark": ("a <thin", [("content", "a <thin")]),
    "thoughts without an end": ("<think>hmm", [("reasoning_content", "hmm")]),
}


def parsed(text: str, cuts: list[int], **how: bool) -> list[tuple[str, str]]:
    """The parts of a text that comes in pieces; neighbours of one kind are joined."""
    parser, parts = MessageParser(**{"calls": True, **how}), []
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        parts += parser.push(text[begin:end])
    parts += parser.push("", at_end=True)
    groups = groupby(parts, key=lambda part: (part.name or part.kind, part.call))
    return [(name, "".join(part.text for part in group)) for (name, _), group in groups]


@pytest.mark.parametrize("case", TEXTS)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_parts_do_not_depend_on_cuts(case, cuts):
    """Whole or in pieces, the same parts."""
    text, expected = TEXTS[case]
    assert parsed(text, cuts) == expected


def test_what_was_not_asked_for_is_content():
    """Without tools a call is text; a prompt that ends with <think> begins with thoughts."""
    assert parsed(CALL, [], calls=False) == [("content", CALL)]
    assert parsed("hmm</think>yes", [2], thinks=True) == [("reasoning_content", "hmm"), ("content", "yes")]


@given(st.text(max_size=60))
def test_plain_text_is_kept(text):
    """A text without marks is content, character by character, but for line ends before it."""
    expected = text.lstrip("\n")
    if "<think>" not in text and "<tool_call>" not in text:
        assert parsed(text, list(range(len(text)))) == ([("content", expected)] if expected else [])


@pytest.mark.parametrize("arguments", ["5", "[1]", '{"a": NaN}', '{"a": 1e999}', "[" * 5000])
def test_arguments_that_are_no_object(arguments):
    """A client could do nothing with them: what is written is content."""
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parsed(text, [3]) == [("content", text)]


def test_arguments_are_json():
    """They may be written as an object or as a text; both come as a text. Without any they are an empty object."""
    ((name, said),) = parsed('<tool_call>{"name": "f", "arguments": null}</tool_call>', [])
    assert (name, said) == ("f", "{}")
    for arguments in ({"x": "é"}, '{"x": "é"}'):
        text = "<tool_call>" + json.dumps({"name": "f", "arguments": arguments}) + "</tool_call>"
        ((name, said),) = parsed(text, [])
        assert (name, json.loads(said)) == ("f", {"x": "é"})
