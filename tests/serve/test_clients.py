"""OpenAI's own client: every call gives what its types say, streams give the same text, mistakes raise its exceptions."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import mpar
from mpar import models
from mpar.infer import RowRunner, Sizes
from tests.infer.cached_tokens import CachedTokens
from tests.infer.test_assistant import CONFIG
from tests.serve.conftest import SIZES, serving

ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server):
    """OpenAI's client of the server."""
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client, server):
    """The list has the model, which can be asked for by its name; the server has a version."""
    assert httpx.get(f"{server[0]}/version").json() == {"version": mpar.__version__}
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mpar"


def test_a_conversation_streams_what_it_gives_at_once(client):
    """The same text, reason and counts; the first chunk has the role; log-probabilities are of the tokens."""
    how = {"model": "tiny", "messages": ASKED, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**how)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    (choice,) = whole.choices
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert (parts[0].delta.role, parts[-1].finish_reason) == ("assistant", choice.finish_reason)
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens == len(choice.logprobs.content)
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_several_prompts(client):
    """Choices are numbered prompt by prompt; a prompt may be tokens; echo gives the prompt and its log-probabilities."""
    prompts = ["one", "two"]
    whole = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=4, temperature=1.0, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text != whole.choices[1].text
    alone = client.completions.create(model="tiny", prompt=list(b"two"), n=2, max_tokens=4, temperature=1.0, seed=3)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in whole.choices[2:]]
    echoed = client.completions.create(model="tiny", prompt="abc", max_tokens=1, echo=True, logprobs=1).choices[0]
    scores = echoed.logprobs
    assert echoed.text.startswith("abc") and scores.tokens[:3] == ["a", "b", "c"] and scores.text_offset[:3] == [0, 1, 2]
    assert scores.token_logprobs[0] is None and all(value <= 0 for value in scores.token_logprobs[1:])
    assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values())
    streamed = list(client.completions.create(model="tiny", prompt="abc", max_tokens=5, stream=True, echo=True))
    at_once = client.completions.create(model="tiny", prompt="abc", max_tokens=5, echo=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == at_once.choices[0].text


@pytest.mark.parametrize("how", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}], ids=["answer", "echo", "only prompt"])
def test_log_probabilities_of_a_stream(client, how):
    """Together they are what comes at once, each token where its text begins, also while a stop or a character is not certain."""
    how = {"prompt": ["abc", "héé"], "max_tokens": 30, "n": 2, "temperature": 1, "seed": 5, "logprobs": 2, **how}
    how |= {"model": "tiny", "stop": ["G", "\x05", "\ufffd\ufffd"]}
    whole = client.completions.create(**how)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**how, stream=True)]
    for choice in whole.choices:
        parts = [chunk.logprobs for chunk in chunks if chunk.index == choice.index and chunk.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in getattr(part, name)] == getattr(choice.logprobs, name)


def test_the_scores_of_a_prompt_alone(client, server):
    """max_tokens=0 with echo gives the prompt with the log-probabilities that it has before an answer, and no token behind."""
    how = {"model": "tiny", "prompt": ["abc", list(b"de")], "echo": True, "logprobs": 1}
    longer, alone = (client.completions.create(**how, max_tokens=count) for count in (1, 0))
    for with_answer, choice in zip(longer.choices, alone.choices, strict=True):
        count = len(choice.logprobs.tokens)
        assert (choice.text, choice.finish_reason) == (with_answer.text[:count], "length") and count in (2, 3)
        assert choice.logprobs.token_logprobs == with_answer.logprobs.token_logprobs[:count]
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (5, 0)
    streamed = client.completions.create(**how, max_tokens=0, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "abcde"
    assert server[1].num_running == server[1].num_waiting == 0 and not server[1]._jobs
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        client.completions.create(model="tiny", prompt="abc", max_tokens=0)
    full = client.completions.create(model="tiny", prompt="a" * 256, echo=True, logprobs=0, max_tokens=0)
    assert len(full.choices[0].logprobs.tokens) == 256


def test_lines_of_a_stream_are_lines_to_every_client(server):
    """httpx and others split lines at U+0085, U+2028 and the like, too."""
    prompt = "a\u2028b\x85c\x0bé"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True, "echo": True}
    with httpx.stream("POST", f"{server[0]}/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line not in ("", "data: [DONE]")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines).startswith(prompt)


def test_stops_and_biases(client):
    """A stop text ends the answer and is not in it; a bias of 100 makes a token certain."""
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=20, logit_bias={"97": 50, "98": 49.9}).choices[0]
    assert set(free.text) == {"a"} and free.finish_reason == "length"
    stopped = client.completions.create(model="tiny", prompt="abc", max_tokens=20, logit_bias={"97": 100}, stop="aaa").choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_answers_by_a_schema(client):
    """Chat and completions give JSON as the schema says, streamed too; a schema that cannot be used is refused with the field."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
    how = {"model": "tiny", "max_tokens": 60, "temperature": 1.0}
    by_schema = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    for seed in range(3):
        asked = {**how, "messages": ASKED, "seed": seed, "response_format": by_schema}
        whole = client.chat.completions.create(**asked).choices[0]
        assert json.loads(whole.message.content)["n"] in (1, 22) and whole.finish_reason == "stop"
        streamed = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.message.content
    text = client.completions.create(**how, prompt="x", extra_body={"response_format": by_schema}).choices[0].text
    assert json.loads(text)["n"] in (1, 22)
    bias = {str(ord("}")): 100}  # else this model would go on until the tokens are used up
    some = client.chat.completions.create(**how, messages=ASKED, response_format={"type": "json_object"}, logit_bias=bias)
    assert isinstance(json.loads(some.choices[0].message.content), dict)
    for wrong, message in (
        ({"type": "xml"}, "json_schema"),
        ({"type": "json_schema"}, "must be an object with a schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}}, "Invalid type"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            client.chat.completions.create(**how, messages=ASKED, response_format=wrong)
        assert raised.value.param.startswith("response_format")


def test_many_clients_get_what_each_gets_alone(server):
    """Twenty-four clients at the same time, some of which leave: no answer has a token of another one."""
    address, worker = server
    prompts = [f"client {n} says " + "x" * (7 * n % 60) for n in range(24)]
    body = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True}

    def ask(prompt: str) -> str:
        return httpx.post(f"{address}/v1/completions", json={"prompt": prompt, **body}, timeout=60).json()["choices"][0]["text"]

    def leave(prompt: str) -> None:
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={"prompt": prompt, **body, "max_tokens": 200, "stream": True}
        ) as r:
            next(r.iter_lines())

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(30) as pool:
        gone = [pool.submit(leave, prompt) for prompt in prompts[:4]]
        assert list(pool.map(ask, prompts)) == alone
        assert [future.result() for future in gone] == [None] * 4
    wait_until(lambda: worker.assistant.is_idle)
    assert worker.counts[None].ended["cancelled"] == 4
    assert worker.assistant.engine.scheduler.pools[0].num_free == 128


def wait_until(holds) -> None:
    """Wait until something holds, for at most ten seconds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Slow(CachedTokens):
    """A runner whose steps wait for a permit, and fail when there is an order to."""

    def __init__(self, adapters: Sequence[str] = ()) -> None:
        super().__init__(Sizes(rows=1, tokens=64, pages=17, page_size=16, length=256), adapters=adapters)
        self.permits, self.fails = threading.Semaphore(0), False

    @contextmanager
    def unhindered(self) -> Iterator[None]:
        """At the end steps wait no more, so that a server with a failed test can stop."""
        try:
            yield
        finally:
            self.permits.release(10_000)

    def step(self, tables):
        """See `Runner`."""
        self.permits.acquire()
        if self.fails:
            raise RuntimeError("the device is gone")
        return super().step(tables)


def test_too_many_requests_are_refused_and_a_failure_ends_all():
    """Beyond `max_waiting` the status is 429 with a time to try again; when the engine fails, everybody is told."""
    runner = Slow()
    with serving(runner, max_waiting=2) as (address, worker), ThreadPoolExecutor(4) as pool:
        ask = lambda: httpx.post(f"{address}/v1/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=30)  # noqa: E731
        first = pool.submit(ask)
        wait_until(lambda: worker.num_running == 1)
        queued = [pool.submit(ask) for _ in range(2)]
        wait_until(lambda: worker.num_waiting == 2)
        refused = ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert httpx.get(f"{address}/health").status_code == 200
        runner.fails = True
        runner.permits.release()
        answers = [future.result() for future in (first, *queued)]
        assert {answer.status_code for answer in answers} == {503}
        assert "the device is gone" in answers[0].json()["error"]["message"]
        assert httpx.get(f"{address}/health").status_code == 503
        assert ask().status_code == 503
        assert isinstance(worker.failure, RuntimeError)


class Broken(RowRunner):
    """Logits behind the token of "!", and scores of a text with it, are no numbers."""

    def __init__(self) -> None:
        model = models.build("qwen3", CONFIG)
        super().__init__(model, model.init(0), SIZES)

    def step(self, tables):
        """See `Runner.step`."""
        logits_RV = super().step(tables)
        logits_RV[tables.rows_T[tables.tokens_T == ord("!")].unique(), 7] = torch.nan
        return logits_RV

    def scores(self, texts, *args):
        """See `Runner.scores`."""
        found = super().scores(texts, *args)
        for text, each in zip(texts, found, strict=True):
            each.logprobs_S[text[1:] == ord("!")] = torch.nan
        return found


def test_an_answer_that_cannot_be_made_ends_alone():
    """Where logits are no finite numbers the status is 500, in the middle of a stream too; what else is asked goes on."""
    with serving(Broken()) as (address, worker), ThreadPoolExecutor(4) as pool:

        def ask(prompt: str, **fields: object) -> httpx.Response:
            return httpx.post(f"{address}/v1/completions", json={"prompt": prompt, "max_tokens": 30, **fields}, timeout=30)

        whole = pool.submit(ask, "ab")
        for fields in ({}, {"n": 3}, {"logprobs": 1, "echo": True, "temperature": 1}):
            failed = ask("ab!", **fields)
            assert failed.status_code == 500 and "no finite numbers" in failed.json()["error"]["message"]
        assert "no finite numbers" in ask("ab!", stream=True).text
        assert whole.result().json()["choices"][0]["finish_reason"] in ("length", "stop")
        assert ask("ab").json()["choices"] == whole.result().json()["choices"]
        wait_until(lambda: worker.num_running == worker.num_waiting == 0)
        assert not worker._jobs and not worker._places
        assert 'finish="error"' in httpx.get(f"{address}/metrics").text


def test_names_of_parts_of_characters(client):
    """Tokens that are a part of a character have its byte, so that a client can put characters together."""
    text = "é😀"
    chat = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=1, logprobs=True, logit_bias={str(text.encode()[0]): 100}
    )
    assert chat.choices[0].logprobs.content[0].bytes == [text.encode()[0]]
    echoed = client.completions.create(model="tiny", prompt=text, max_tokens=1, echo=True, logprobs=5).choices[0].logprobs
    assert echoed.tokens[: len(text.encode())] == [f"bytes:\\x{byte:02x}" for byte in text.encode()]
    assert all(len(named) == 5 for named in echoed.top_logprobs[1:])


def test_names_of_tokens_without_a_text():
    """A model may have more tokens than its tokenizer: each is named by its number."""
    model = models.build("qwen3", {**CONFIG, "vocab_size": 280})
    with serving(RowRunner(model, model.init(0), SIZES)) as (address, _):
        body = {"prompt": "abc", "max_tokens": 6, "logprobs": 20, "logit_bias": {str(token): 50 for token in range(260, 280)}}
        found = httpx.post(f"{address}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [len(named) for named in found["top_logprobs"]] == [20] * 6
    assert all(name.startswith("token_id:2") for name in found["tokens"])


def test_requests_without_a_seed_draw_unlike_answers(client):
    """One with a seed always has the same."""
    ask = lambda **how: client.completions.create(model="tiny", prompt="ab", max_tokens=20, temperature=1, **how).choices[0].text  # noqa: E731
    assert len({ask() for _ in range(4)}) == 4
    assert len({ask(seed=3) for _ in range(2)}) == 1


def test_fields_that_change_nothing_are_taken(client):
    """As clients of OpenAI and of other servers send them."""
    extra = {"skip_special_tokens": True, "chat_template_kwargs": {}, "best_of": None, "parallel_tool_calls": True}
    how = {"model": "tiny", "messages": ASKED, "max_tokens": 9}
    for unset in ({"echo": False, "prompt": None}, {"max_completion_tokens": None}):
        assert client.chat.completions.create(**how, extra_body=unset).usage.completion_tokens <= 9
    for unset in ({"tools": [], "tool_choice": "auto"}, {"max_completion_tokens": 1}):
        found = client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body=unset)
        assert found.usage.completion_tokens <= 1
    found = client.chat.completions.create(**how, user="me", metadata={"a": "b"}, extra_body=extra)
    assert found.choices == client.chat.completions.create(**how).choices


def test_one_request_may_not_ask_for_more_than_can_wait(server):
    """It is refused: to try again later would not help."""
    body = {"prompt": ["a"] * 100, "max_tokens": 1}
    response = httpx.post(f"{server[0]}/v1/completions", json=body)
    assert response.status_code == 400 and "asks for 100 answers" in response.json()["error"]["message"]


def test_a_client_that_leaves_in_the_middle_of_its_body(server, caplog):
    """Nothing is logged, and the next one is answered."""
    address, _ = server
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert httpx.post(f"{address}/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200
    assert not caplog.records


def test_a_very_long_text_stops_nobody(server):
    """A prompt of a million characters is refused, and others are answered meanwhile."""
    address, _ = server
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(lambda: httpx.post(f"{address}/v1/completions", json={"prompt": "ab" * 2**20}, timeout=60))
        waits = []
        while not long.done():
            began = time.monotonic()
            assert httpx.get(f"{address}/health").status_code == 200
            waits.append(time.monotonic() - began)
        assert long.result().status_code == 400 and "2097152 tokens" in long.result().json()["error"]["message"]
    assert len(waits) > 1 and sorted(waits)[len(waits) // 2] < 0.5


def test_a_failure_ends_a_stream_with_an_error():
    """OpenAI's client raises it in the middle of a stream."""
    runner = Slow()
    with serving(runner) as (address, _), openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        runner.permits.release()
        stream = client.completions.create(model="tiny", prompt="ab", max_tokens=30, stream=True)
        runner.fails = True
        runner.permits.release()
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(stream)


def test_answers_that_do_not_end_in_time_are_told_so(caplog):
    """At its end the server waits for `drain_s`; then a request gets the status 503, a stream an error, the log no traceback."""
    runner, body = Slow(), {"prompt": "ab", "max_tokens": 30}
    with ThreadPoolExecutor(2) as pool:
        with serving(runner, drain_s=1) as (address, worker):
            logging.getLogger("uvicorn").addHandler(caplog.handler)  # which tells its parents nothing
            whole = pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=30)
            wait_until(lambda: worker.num_running == 1)
            stream = pool.submit(httpx.post, f"{address}/v1/completions", json={**body, "stream": True}, timeout=30)
            wait_until(lambda: worker.num_waiting == 1)
            threading.Timer(3.0, runner.permits.release, (10_000,)).start()
        assert whole.result().status_code == 503
        *_, told, end = stream.result().text.split("\n\n")[:-1]
        errors = [whole.result().json()["error"], json.loads(told.removeprefix("data: "))["error"]]
        assert [error["message"] for error in errors] == ["the server stopped before this answer was complete (drain_s=1)"] * 2
        assert end == "data: [DONE]" and not caplog.records
        logging.getLogger("uvicorn").removeHandler(caplog.handler)


def test_keys(tiny_runner):
    """Without one of the keys the client raises AuthenticationError; health needs none."""
    with serving(tiny_runner, api_keys=("first", "second")) as (address, _):
        for key, accepted in (("first", True), ("second", True), ("firs", False), ("firstfirst", False)):
            response = httpx.get(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == (200 if accepted else 401)
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert httpx.get(f"{address}/health").status_code == 200


def test_exceptions_of_the_client(client):
    """What is not there is NotFoundError, what cannot be is BadRequestError, with the field."""
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.chat.completions.create(model="other", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert raised.value.param == "prompt" and "300 tokens" in str(raised.value)


def test_counts_for_prometheus(server):
    """What was answered is counted, as Prometheus reads it; how long clients waited is in histograms."""
    address, worker = server

    def values() -> dict[str, float]:
        text = httpx.get(f"{address}/metrics").text
        samples = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
        return {f"{sample.name}{''.join(sample.labels.values())}": sample.value for sample in samples}

    before = values()
    httpx.post(f"{address}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    after = values()
    assert after["mpar_answer_tokens_totaltiny"] == worker.counts[None].answer_tokens > 0
    assert after["mpar_answers_totallengthtiny"] == before.get("mpar_answers_totallengthtiny", 0) + 1
    for name, count in (("time_to_first_token", 1), ("inter_token_latency", 4), ("e2e_request_latency", 1)):
        name = f"mpar_{name}_seconds"
        assert after[f"{name}_count"] - before[f"{name}_count"] == count
        assert after[f"{name}_bucket+Inf"] == after[f"{name}_count"] and after[f"{name}_sum"] > before[f"{name}_sum"]


def test_tokens_of_texts(server):
    """Texts and conversations become tokens, and tokens texts."""
    address = server[0]
    assert httpx.post(f"{address}/tokenize", json={"prompt": "ab"}).json() == {
        "tokens": [97, 98],
        "count": 2,
        "max_model_len": 256,
    }
    assert httpx.post(f"{address}/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}
    chat = httpx.post(f"{address}/tokenize", json={"messages": ASKED}).json()
    assert bytes(token for token in chat["tokens"] if token < 256).decode() == "user\nhello\nassistant\n"


class Unprepared(CachedTokens):
    """A runner with three parts to prepare, each of which waits for a permit; `prepared` says before how many steps it was."""

    def __init__(self) -> None:
        super().__init__(Sizes(rows=1, tokens=64, pages=17, page_size=16, length=256))
        self.permits, self.num_steps, self.prepared = threading.Semaphore(0), 0, []

    def step(self, tables):
        """See `Runner`."""
        self.num_steps += 1
        return super().step(tables)

    def prepare_next(self) -> bool:
        """See `Runner`."""
        self.permits.acquire()
        self.prepared.append(self.num_steps)
        return len(self.prepared) < 3


def test_the_server_prepares_while_nobody_asks():
    """It answers before all is prepared, goes on behind the answer, and ends with the last part."""
    runner = Unprepared()
    with serving(runner) as (address, _), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{address}/v1/completions", json={"prompt": "ab", "max_tokens": 3}, timeout=30)
        wait_until(lambda: httpx.get(f"{address}/metrics").text.count("mpar_waiting 1"))
        runner.permits.release()
        assert asked.result().status_code == 200
        runner.permits.release(9)
        wait_until(lambda: len(runner.prepared) == 3)
    assert runner.prepared == [0, runner.num_steps, runner.num_steps] and runner.num_steps == 3
