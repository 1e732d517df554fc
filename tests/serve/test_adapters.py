"""Adapters behind the server: each is a model of OpenAI's client, and answers of several at once stay what each gives alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from mpar import models
from mpar.adapters import LoRA, bank_of
from mpar.data import byte_tokenizer
from mpar.errors import ConfigError
from mpar.infer import Assistant, RowRunner, Sampling
from mpar.infer.compile import ProgramRunner
from mpar.serve import ServeOptions, Worker, make_app
from tests.infer.banks import bank_params, merged_params
from tests.infer.test_assistant import CONFIG
from tests.serve.conftest import SIZES, serving

NAMES = ["tiny", "french", "sql-v2"]
TEXTS = ["abc", "the same beginning of sixteen tokens and more", "xyz"]


@pytest.fixture(scope="module")
def bank():
    """A bank of two adapters, and the parameters of its base."""
    model = models.build("qwen3", CONFIG)
    loras = {"french": LoRA(rank=3, alpha=9, init="random"), "sql-v2": LoRA(rank=2, init="random", targets=("o_proj", "lm_head"))}
    return bank_of(model, loras), model.init(0)


@pytest.fixture(scope="module")
def server(bank) -> Iterator[tuple[str, Worker]]:
    """The address of a server of all, and its worker."""
    with serving(ProgramRunner(bank[0], bank_params(*bank), SIZES)) as address_and_worker:
        yield address_and_worker


@pytest.fixture
def client(server):
    """OpenAI's client of the server."""
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_have_their_parent(client):
    """The list has the base and its adapters, whose parent it is; each can be asked for by its name."""
    listed = client.models.list().data
    assert [(model.id, model.parent) for model in listed] == [("tiny", None), ("french", "tiny"), ("sql-v2", "tiny")]
    assert client.models.retrieve("sql-v2") == listed[2]


def test_answers_of_several_models_at_once(bank, client):
    """Twelve clients of three models: each text, and each score of a prompt, is that of the model with its adapter merged."""
    expected = {}
    for name, adapter in zip(NAMES, (None, *bank[0].adapter_names), strict=True):
        runner = RowRunner(bank[0].base, merged_params(*bank, adapter), SIZES)
        assistant = Assistant(runner, byte_tokenizer())
        answers = {text: assistant.continue_text(text, Sampling(max_tokens=8)) for text in TEXTS}
        list(assistant.run())
        scores = [chosen.logprob for chosen in assistant.score(list(TEXTS[1].encode()))]
        expected |= {(name, text): (answer.text, scores) for text, answer in answers.items()}
        assistant.tokenizer.close()

    def ask(asked):
        (name, text), number = asked
        how = {"model": name, "max_tokens": 8, "temperature": 0}
        if number == 0:
            return client.completions.create(prompt=text, **how).choices[0].text
        chunks = list(client.completions.create(prompt=text, stream=True, **how))
        assert {chunk.model for chunk in chunks} == {name}
        return "".join(chunk.choices[0].text for chunk in chunks)

    asked = [(key, number) for number in range(2) for key in expected]
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, asked))
    assert texts == [expected[key][0] for key, _ in asked]
    assert len({text for (_, asked_text), (text, _) in expected.items() if asked_text == TEXTS[1]}) == 3
    for name in NAMES:
        echoed = client.completions.create(model=name, prompt=TEXTS[1], max_tokens=1, echo=True, logprobs=1).choices[0]
        found, scores = echoed.logprobs.token_logprobs, expected[name, TEXTS[1]][1]
        assert all(abs(one - other) < 1e-5 for one, other in zip(found[1 : len(scores)], scores[1:], strict=True))


def test_conversations_name_their_model(client):
    """The answer says which model gave it."""
    messages = [{"role": "user", "content": "hello"}]
    texts = [client.chat.completions.create(model=name, messages=messages, max_tokens=9, temperature=0) for name in NAMES]
    assert [text.model for text in texts] == NAMES
    assert len({text.choices[0].message.content for text in texts}) == 3


def test_unknown_models_are_not_found(client):
    """In OpenAI's shape, with the nearest names, and for every route that names a model."""
    with pytest.raises(openai.NotFoundError, match=r"`sql` does not exist\. The nearest of 3 are `sql-v2`, "):
        client.completions.create(model="sql", prompt="abc")
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="frensh", messages=[{"role": "user", "content": "hello"}])
    assert raised.value.param == "model" and "are `french`" in str(raised.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("frensh")


def test_counts_by_model(server, client):
    """What was read, shared, answered and ended is counted for each model."""
    address, worker = server

    def values():
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    before = values()
    for _ in range(2):
        how = {"max_tokens": 3, "temperature": 0, "extra_body": {"ignore_eos": True}}
        client.completions.create(model="sql-v2", prompt="counted " * 5, **how)
    after = values()
    grown = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0) and "model=" in key}
    assert grown == {
        'mpar_prompt_tokens_total{model="sql-v2"}': 80,
        'mpar_shared_tokens_total{model="sql-v2"}': 32,
        'mpar_answer_tokens_total{model="sql-v2"}': 6,
        'mpar_answers_total{finish="length",model="sql-v2"}': 2,
    }
    assert worker.counts["sql-v2"].answer_tokens == after['mpar_answer_tokens_total{model="sql-v2"}']


def test_an_adapter_with_the_name_of_the_model_is_refused(server):
    """Requests could not tell them apart."""
    with pytest.raises(ConfigError, match=r"(?s)under the name of the model, 'french'.*another name="):
        make_app(server[1], ServeOptions(model="french", sampling=Sampling()))
