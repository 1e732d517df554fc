"""Answers by a schema: with any parameters they parse, and another library validates them; what cannot be used is refused."""

import json
import sys

import jsonschema
import pytest
import torch

from mpar import models
from mpar.data import byte_tokenizer
from mpar.errors import ConfigError
from mpar.infer import Assistant, RowRunner, Sampling, Sizes
from tests.infer.test_assistant import CONFIG

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", "naïve 😀"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "owner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/owner"}]},
    },
    "required": ["name", "age", "kind", "tags", "owner"],
    "additionalProperties": False,
    "$defs": {
        "owner": {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99999}},
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {
    "object": PERSON,
    "number": {"type": "integer", "minimum": 10, "maximum": 99},
    "choice": {"enum": ["yes", "no"]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
}


@pytest.fixture(scope="module")
def assistant():
    """A model with fresh parameters, which answers nonsense, and has more tokens than its tokenizer."""
    model = models.build("qwen3", {**CONFIG, "vocab_size": 300})
    sizes = Sizes(rows=9, tokens=64, pages=300, page_size=16, length=512)
    return Assistant(RowRunner(model, model.init(0), sizes), byte_tokenizer())


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_is_what_the_schema_says(assistant, name):
    """Greedy and drawn answers, beside one without a schema, which is as it is alone."""
    schema, free = SCHEMAS[name], Sampling(max_tokens=20, ignore_eos=True)
    alone = assistant.continue_text("free", free)
    list(assistant.run())
    answers, beside = [], assistant.continue_text("free", free)
    for seed in range(8):
        sampling = Sampling(max_tokens=400, temperature=float(seed > 0), seed=seed, schema=json.dumps(schema), min_tokens=3)
        answers.append(assistant.continue_text(f"question {seed}", sampling))
    list(assistant.run())
    assert beside.text == alone.text
    for answer in answers:
        assert answer.request.finish == "stop"
        jsonschema.validate(json.loads(answer.text), schema)
    assert name != "object" or len({answer.text for answer in answers}) > 3


def test_a_bias_chooses_among_what_is_allowed(assistant):
    """A bias towards a token that the schema does not permit changes nothing; one towards a permitted token does."""
    schema = json.dumps({"enum": ["yes", "no"]})
    for letter, expected in (("n", "no"), ("y", "yes")):
        answer = assistant.continue_text("say", Sampling(max_tokens=9, schema=schema, bias={ord("q"): 100.0, ord(letter): 50.0}))
        list(assistant.run())
        assert json.loads(answer.text) == expected


def test_an_answer_without_room_is_cut(assistant):
    """It says so, and is the beginning of what the schema permits."""
    answer = assistant.continue_text("say", Sampling(max_tokens=5, schema=json.dumps({"const": "a long constant"})))
    list(assistant.run())
    assert (answer.text, answer.request.finish) == ('"a lo', "length")


@pytest.mark.cases(7)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "EOF"),
        ('{"type": "strange"}', "Invalid type: strange"),
        ('{"type": "object", "not": {"type": "string"}}', "Unimplemented keys"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"type": "string", "pattern": "("}', "regex parse error: error: unclosed group"),
        ('{"$ref": "#"}', "no JSON fits it"),
        ("false", "object schema"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused(assistant, schema, message):
    """With what is wrong with them; no request is begun."""
    with pytest.raises(ConfigError, match="cannot answer by this schema") as raised:
        assistant.continue_text("say", Sampling(max_tokens=5, schema=schema))
    assert message.lower() in str(raised.value).lower()
    assert assistant.is_idle


def test_a_missing_library_is_named(assistant, monkeypatch):
    """With the extra that has it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"llguidance is missing.*mpar\[grammar\]"):
        assistant.check_schema("{}")


def test_every_token_of_the_mask_is_of_the_model(assistant):
    """The mask has a value for each of the model's tokens; those that the tokenizer does not have are out."""
    allowed_V = assistant._grammars.begin('{"type": "string"}').allowed()
    assert allowed_V.shape == (300,) and allowed_V.dtype == torch.bool
    assert allowed_V.nonzero()[:, 0].tolist() == [ord('"')]
