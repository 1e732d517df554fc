"""Conversations are the ids that transformers makes of them, and the same of them are trained on."""

import pytest
import transformers

from mpar import data
from tests.data.families import FAMILIES, TOOLS, backend, dialogs, template

_COUNT = 25  # of each of the eight families


def expected_of(name, messages, tools):
    """Ids and mask by transformers, from the template with marks."""
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(name), **FAMILIES[name].special)
    peer.chat_template = template(name, marked=True)
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "tools": tools}
    made = peer.apply_chat_template(messages, **options)
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("marked", [True, False], ids=["marks", "no marks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks(name, marked):
    """Systems, tools, calls, thoughts and turns, with a template that marks answers and with the same one without marks."""
    tokenizer = data.Tokenizer(backend(name), special=FAMILIES[name].special, chat_template=template(name, marked=marked))
    chats = dialogs(name, _COUNT)
    for chat, encoded in zip(chats, tokenizer.encode_chats(chats), strict=True):
        assert not isinstance(encoded, Exception), (encoded, chat)
        ids, mask = expected_of(name, *chat)
        assert encoded[0] == ids, chat
        trained = tokenizer.decode([i for i, weight in zip(ids, encoded[1], strict=True) if weight])
        assert trained == tokenizer.decode([i for i, weight in zip(ids, mask, strict=True) if weight]), chat
        assert encoded[1] == mask, chat
    tokenizer.close()


@pytest.mark.parametrize("jinja_files", [True, False], ids=["files", "in the config"])
def test_another_template_for_tools(jinja_files, tmp_path):
    """A tokenizer with a second template for conversations with tools, with line breaks at the ends of both."""
    named = {
        "default": "\n{{ messages[0].content }}\n \n\n",
        "tool_use": "{% if true %}\n\nT{% endif %}\n{{ messages[0].content }}  \n",
    }
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend("qwen3"), **FAMILIES["qwen3"].special)
    peer.chat_template = named
    peer.save_pretrained(tmp_path, save_jinja_files=jinja_files)
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    for tools in (None, TOOLS):
        chat = [{"role": "user", "content": "the thing"}]
        expected = peer.apply_chat_template(chat, tools=tools, tokenize=True, return_dict=False)
        assert tokenizer.apply_chat_template(chat, tools=tools) == expected
    tokenizer.close()
