"""Malformed requests: each gets a status below 500 and OpenAI's error, which names the field."""

import json

import httpx
import pytest

from tests.serve.conftest import serving

WRONG = {
    "temperature": [-1, "hot", True, [1], {}, 1e400],
    "top_p": [0, 1.5, "all", -0.1],
    "top_k": [1.5, "few"],
    "min_p": [-1, 2, "x"],
    "n": [0, -1, 1000, 1.5, "two"],
    "max_tokens": [0, -5, 1.5, "many"],
    "presence_penalty": [-3, 3, "x"],
    "frequency_penalty": [-3, 3, []],
    "repetition_penalty": [0, -1, "x"],
    "seed": [-1, 1.5, "x", 2**64],
    "stop": [0, 3, False, [3], [""], [["x"]], ["a"] * 20],
    "stop_token_ids": [3, False, ["x"], [1.5], [5000], [-1], [-601], [10**30]],
    "no_such_field": [3],
    "allowed_token_ids": [[3]],
    "logit_bias": [
        *(3, [1], {"x": 1}, {"1": "x"}, {"1": 101}, {"-4": 1}, {"99999": 1}),
        *([], {"65": "1"}, {"65": True}, {"65": 10**400}),
        *({" 65": 1}, {"6_5": 1}, {"\u0666\u0665": 1}),
    ],
    "stream": ["yes", 1, []],
    "stream_options": [0, 3, "x", [1], {"include_usage": True}],
    "ignore_eos": [1, "x"],
    "min_tokens": [-1, 1.5],
    "model": ["other", 3, ["tiny"], "\ud800"],
    "\ud800": [3],
    "response_format": [3, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}],
    "best_of": [3, True],
    "suffix": ["x"],
    "audio": [{"voice": "x"}],
    "functions": [[{}]],
    "guided_json": [{}],
}
USER = {"role": "user", "content": "x"}
OF_COMPLETIONS = {
    "prompt": [3, {}, [], [["x"]], [[]], ["a", 3], [1.5], [-1], [99999], [[5, 99999]], "y" * 300, True, "\ud800"],
    "logprobs": [-1, 21, "x", 1.5, True],
    "echo": ["x", 1],
    "messages": [[USER]],
    "tools": [[{"type": "function"}]],
    "top_logprobs": [3],
    "chat_template_kwargs": [{"enable_thinking": False}],
}
OF_CHATS = {
    "messages": [
        None,
        3,
        [],
        "x",
        [3],
        [{}],
        [{"role": 3}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": "z" * 300}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "somebody", "content": "x"}],
        *([USER, {"role": "assistant", "tool_calls": made}] for made in (3, [3], [{}], [{"function": "f"}], [{"function": {}}])),
    ],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}, 3],
    "top_logprobs": [3],
    "logprobs": [3, "x"],
    "tools": [3, [3], "x"],
    "tool_choice": ["required", {"type": "function"}, 3],
    "max_completion_tokens": [0, "x", -1],
    "prompt": ["x"],
    "echo": [True],
}
BODIES = [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "a"', b"[" * 100000, b'{"prompt": NaN}']


def refused(response: httpx.Response) -> dict:
    """The error of a response, which must be the client's mistake."""
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize("field", [*WRONG, *OF_COMPLETIONS])
def test_fields_of_completions(server, field):
    """Every wrong value of every field."""
    for value in {**WRONG, **OF_COMPLETIONS}[field]:
        content = json_of({"prompt": "a", "max_tokens": 1, field: value})
        error = refused(httpx.post(f"{server[0]}/v1/completions", content=content))
        assert error["param"] == field or field in error["message"] or field == "prompt", error


@pytest.mark.parametrize("field", [*WRONG, *OF_CHATS])
def test_fields_of_chats(server, field):
    """Every wrong value of every field."""
    for value in {**WRONG, **OF_CHATS}[field]:
        content = json_of({"messages": [USER], "max_tokens": 1, field: value})
        error = refused(httpx.post(f"{server[0]}/v1/chat/completions", content=content))
        assert str(error["param"]).startswith(field) or field in error["message"] or field == "messages", error


def json_of(body: dict) -> bytes:
    """As JSON, in which numbers may be too large and texts no Unicode."""
    return json.dumps(body).encode()


def test_bodies_and_routes(server):
    """What is no JSON object, and addresses that are not there; afterwards the server answers."""
    for body in BODIES:
        for route in ("completions", "chat/completions"):
            if body != b'{"prompt": NaN}' or route == "completions":
                refused(httpx.post(f"{server[0]}/v1/{route}", content=body))
    for method, route in (("GET", "/v1/completions"), ("POST", "/v1/models"), ("GET", "/v2"), ("GET", "/v1/models/none")):
        refused(httpx.request(method, f"{server[0]}{route}"))
    for body in ({}, {"tokens": "x"}, {"tokens": [10**9]}, {"tokens": [-1]}):
        refused(httpx.post(f"{server[0]}/detokenize", json=body))
    assert httpx.post(f"{server[0]}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_what_a_stream_is_asked_to_have(server):
    """Also where it is one."""
    for options in ({"include_usage": "no"}, {"include_usage": 1}):
        body = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": options}
        assert refused(httpx.post(f"{server[0]}/v1/completions", json=body))["param"] == "stream_options.include_usage"


def test_tools_that_the_template_would_leave_out(server):
    """The template of this model shows no tools, so a request with tools is refused, unless none is to be called."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [USER], "max_tokens": 1, "tools": [tool]}
    for route in ("v1/chat/completions", "tokenize"):
        error = refused(httpx.post(f"{server[0]}/{route}", json=body))
        assert (error["param"], error["type"], error["code"]) == ("tools", "invalid_request_error", "400")
        assert "the chat template shows none to the model" in error["message"]
    for harmless in ({"tools": []}, {"tool_choice": "none"}):
        assert httpx.post(f"{server[0]}/v1/chat/completions", json={**body, **harmless}).status_code == 200


def test_what_is_wrong_with_messages_is_said_of_messages(server):
    """Also where the request names variables of the template."""
    body = {"messages": [{"role": "user", "content": 3}], "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    assert refused(httpx.post(f"{server[0]}/v1/chat/completions", json=body))["param"] == "messages"


def test_pages_of_other_sites(server):
    """A browser sends what a page of another site asks for, and says so; the page of the server itself may ask."""
    body = {"prompt": "a", "max_tokens": 1}
    for origin, status in (("http://elsewhere.org", 403), ("null", 403), (server[0], 200)):
        assert httpx.post(f"{server[0]}/v1/completions", json=body, headers={"Origin": origin}).status_code == status


def test_pages_of_names_that_may_have_been_made_to_lead_here(tiny_runner):
    """A page of an address, of localhost or of a name that was given may ask; one of another name may not, nor a broken one."""
    with serving(tiny_runner, host_names=("chat.example.org",)) as (address, _):
        port = address.rpartition(":")[2]
        names = ("localhost", "me.localhost", "127.0.0.1", "192.168.0.9", "[::1]", "chat.example.org", "Chat.Example.org")
        wrong = ("elsewhere.org", "example.org", "127.0.0.1.elsewhere.org", "localhost.elsewhere.org", "[::1")
        for name, status in [*((name, 200) for name in names), *((name, 403) for name in wrong)]:
            host = f"{name}:{port}"
            headers = {"Origin": f"http://{host}", "Host": host}
            assert httpx.post(f"{address}/tokenize", json={"prompt": "a"}, headers=headers).status_code == status, name
