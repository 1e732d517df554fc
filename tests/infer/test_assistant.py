"""The assistant: answers that come together are those that come alone, and what generation_config.json says counts."""

import json

import pytest
import torch

from mpar import models
from mpar.data import Tokenizer, byte_tokenizer
from mpar.errors import CheckpointError, ConfigError, DataError
from mpar.infer import Assistant, RowRunner, Sampling, Sizes, end_ids, with_defaults
from tests.data.families import FOLDER
from tests.models.variants import KINDS

CONFIG = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
}
SIZES = Sizes(rows=3, tokens=20, pages=33, page_size=8, length=80)


@pytest.fixture(scope="module", params=["qwen3", "mamba2"])
def tiny(request):
    """(model, params), once with a cache of keys, once with the state of a scan."""
    config = CONFIG if request.param == "qwen3" else {**KINDS["mamba2"].base, "vocab_size": 259, "initializer_range": 0.4}
    model = models.build(request.param, config)
    return model, model.init(0)


def assistant_of(tiny) -> Assistant:
    """An assistant of the tiny model."""
    return Assistant(RowRunner(*tiny, SIZES), byte_tokenizer())


def read_anew(model, params, tokens: list[int], count: int, end: int) -> list[int]:
    """The tokens with up to `count` likeliest ones, for each of which the model reads the whole row."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model.apply(params, torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == end:
            break
    return tokens


def test_answers_together_are_those_alone(tiny):
    """Nine texts at three a time: each is what the model gives for it alone, and what streams is its text."""
    model, params = tiny
    assistant = assistant_of(tiny)
    texts = ["a" * n + "bc" for n in range(1, 18, 2)]
    answers = {text: assistant.continue_text(text, Sampling(max_tokens=9)) for text in texts}
    parts = {answer: "" for answer in answers.values()}
    for answer in assistant.run():
        parts[answer] += answer.take()
    for text, answer in answers.items():
        tokens = assistant.tokenizer.encode(text)
        expected = read_anew(model, params, tokens, 9, 258)
        assert answer.request.tokens == expected
        shown = [token for token in expected[len(tokens) :] if token < 256]
        assert answer.text == parts[answer] == assistant.tokenizer.decode(shown)


def test_seeds_and_choices(tiny):
    """Draws of several answers differ, and repeat with their seed whatever else is asked."""
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=4)
    assistant = assistant_of(tiny)
    first = [assistant.continue_text("tell me", sampling, choice) for choice in range(3)]
    list(assistant.run())
    assistant.continue_text("something else", sampling)
    again = assistant.continue_text("tell me", sampling, 1)
    list(assistant.run())
    assert again.request.tokens == first[1].request.tokens
    assert len({tuple(answer.request.tokens) for answer in first}) == 3


def test_stop_texts_and_the_fewest_tokens(tiny):
    """A stop text ends the answer and is not in it; before `min_tokens` it does not."""
    assistant = assistant_of(tiny)
    free = assistant.continue_text("hello", Sampling(max_tokens=20, temperature=2.0, seed=1, ignore_eos=True))
    list(assistant.run())
    stop = free.text[3:5]
    held = Sampling(max_tokens=20, temperature=2.0, seed=1, ignore_eos=True, stop=(stop,))
    stopped = assistant.continue_text("hello", held)
    late = assistant.continue_text("hello", Sampling(**{**vars(held), "min_tokens": 20}))
    list(assistant.run())
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.request.finish, stopped.stream.stopped_by) == ("stop", stop)
    assert late.request.tokens == free.request.tokens
    assert late.request.finish in ("length", "stop")


def test_cancelled_answers_go_no_further(tiny):
    """What is cancelled gets no more tokens; others end as if it had not been there."""
    assistant = assistant_of(tiny)
    gone, kept = (assistant.continue_text(text, Sampling(max_tokens=6, ignore_eos=True)) for text in ("one", "two"))
    assistant.step()
    assistant.cancel(gone)
    list(assistant.run())
    assert (gone.request.finish, len(gone.request.answer)) == ("cancelled", 1)
    assert (kept.request.finish, len(kept.request.answer)) == ("length", 6)


def test_an_empty_text_begins_with_the_first_token(tiny):
    """The tokenizer's end-of-text token stands for a beginning; without it an empty text is refused."""
    assistant = assistant_of(tiny)
    assert assistant.continue_text("", Sampling(max_tokens=1)).request.prompt == [258]
    with pytest.raises(ConfigError, match="between 1 and 79 fit"):
        assistant.continue_text("x" * 80, Sampling(max_tokens=1))


def with_generation(settings: object) -> models.Model:
    """A model whose folder has this generation_config.json."""
    model = models.build("qwen3", CONFIG)
    object.__setattr__(model, "hf_generation_json", json.dumps(settings))
    return model


def test_defaults_of_the_model():
    """What the user gives counts first, then the file; draws only if the file says so."""
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [5, 6]}
    model = with_generation(settings)
    given = {"temperature": None, "top_k": 3, "top_p": None, "min_p": None, "repetition_penalty": None}
    sampling, stated = with_defaults(model, Sampling(seed=2), given)
    assert stated == {"temperature": 0.7, "repetition_penalty": 1.05}
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty, sampling.seed) == (0.7, 3, 1.05, 2)
    assert with_defaults(model, Sampling(), {"temperature": 0})[1] == {"repetition_penalty": 1.05}
    assert end_ids(model) == (5, 6)
    greedy = with_generation({"temperature": 0.7, "eos_token_id": 5})
    assert with_defaults(greedy, Sampling(), {}) == (Sampling(), {})
    assert end_ids(greedy) == (5,)
    assert with_defaults(with_generation({"do_sample": True}), Sampling(), {})[0].temperature == 1.0


UNUSABLE = [{"do_sample": True, "top_p": 7}, {"repetition_penalty": "1"}, {"do_sample": True, "top_k": -1}]


@pytest.mark.parametrize("settings", UNUSABLE)
def test_files_with_impossible_values_are_named(settings):
    """The message says which file has which value."""
    with pytest.raises(CheckpointError, match=r"generation_config.json of this qwen3: \w+"):
        with_defaults(with_generation(settings), Sampling(), {})
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        end_ids(with_generation({"eos_token_id": "x"}))


def test_conversations_are_rendered_as_in_training(tiny, tmp_path):
    """OpenAI's clients write the arguments of a call as JSON in a text, and a content in parts; templates get objects and texts.
    What a template reads besides is given to it."""
    byte_tokenizer().save(tmp_path)
    assistants = []
    for name in ("qwen2_5", "qwen3", "zephyr"):
        (tmp_path / "chat_template.jinja").write_text((FOLDER / f"{name}.jinja").read_text())
        assistants.append(Assistant(RowRunner(*tiny, SIZES), Tokenizer.from_folder(tmp_path)))
    qwen2_5, qwen3, zephyr = assistants
    function = {"name": "add", "arguments": '{"a": 1}'}
    asked = {"role": "user", "content": [{"type": "text", "text": "1 and "}, {"type": "text", "text": "2?"}]}
    said = [asked, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = qwen2_5.tokenizer.decode(qwen2_5.render(said, tools))
    assert '"arguments": {"a": 1}' in text and "1 and 2?" in text and '{"name": "add", "parameters"' in text
    thinks = [qwen3.tokenizer.decode(qwen3.render([asked], None, {"enable_thinking": value})) for value in (True, False)]
    assert thinks[1] == f"{thinks[0]}<think>\n\n</think>\n\n"
    with pytest.raises(DataError, match="reads no enable_thinking"):
        qwen2_5.render([asked], None, {"enable_thinking": False})
    with pytest.raises(DataError, match="tools cannot be called"):
        zephyr.render([asked], tools)
    with pytest.raises(DataError, match="message 1 has 'tool_calls'"):
        qwen2_5.render([asked, {"role": "assistant", "tool_calls": [{"function": "add"}]}])
    for assistant in assistants:
        assistant.tokenizer.close()
