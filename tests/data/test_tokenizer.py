"""Text to ids and back; folders that transformers reads, and folders that transformers wrote."""

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar import data
from mpar.errors import DataError
from tests.data.families import FAMILIES, backend

TEXTS = [
    "",
    "a",
    "Hello, world.\n",
    "你好，世界",
    "naïve café\r\n\t x",
    "👩‍👩‍👧 \u2028 \x00 end",
    "<|im_start|>user\nhi<|im_end|>\n",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你是谁？"},
    {"role": "assistant", "content": "Mira.\n"},
    {"role": "user", "content": "  again "},
    {"role": "assistant", "content": "Mira 。"},
]
plain_text = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(plain_text)
def test_decode_inverts_encode(text):
    """Any text without lone surrogates survives encoding and decoding."""
    tokenizer = data.byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(plain_text.filter(lambda text: "<|" not in text))
def test_ids_are_bytes(text):
    """The ids of plain text are its UTF-8 bytes."""
    assert data.byte_tokenizer().encode(text) == list(text.encode())


def test_special_tokens_follow_the_bytes(byte_tokenizer):
    """The 259 ids are 256 bytes, padding, start and end of a message."""
    assert byte_tokenizer.encode("<|pad|><|im_start|><|im_end|>") == [256, 257, 258]
    assert (byte_tokenizer.vocab_size, byte_tokenizer.pad_id, byte_tokenizer.eos_id, byte_tokenizer.bos_id) == (
        259,
        256,
        258,
        None,
    )


def test_decode_can_leave_out_special_tokens(byte_tokenizer):
    """Special tokens vanish from the text on request."""
    assert byte_tokenizer.decode([104, 105, 258], skip_special_tokens=True) == "hi"


def test_incomplete_bytes_decode_to_the_replacement_character(byte_tokenizer):
    """Two of the three bytes of a character are no text."""
    assert byte_tokenizer.decode([0xE4, 0xBD]) == "\ufffd"


@pytest.mark.parametrize("family", ["qwen2_5", "mistral"])
def test_bytes_of_tokens_are_those_of_the_text(family):
    """Also of tokens that are parts of characters, whether bytes are characters of the vocabulary or are named."""
    tokenizer = data.Tokenizer(backend(family), special=FAMILIES[family].special)
    text = "answer é😀𝄞"
    tokens = tokenizer.encode(text)
    content = [tokenizer.bytes_of(token) for token in tokens]
    assert b"".join(content).endswith(text.split()[1].encode())
    assert all(len(each) > 0 and b"\xef\xbf\xbd" not in each for each in content)
    assert any(len(each) == 1 and each[0] > 127 for each in content)


@pytest.mark.parametrize("ids", [[259], [-1], [5, 10**9]], ids=str)
def test_decode_refuses_ids_outside_the_vocabulary(byte_tokenizer, ids):
    """An id that does not exist is named."""
    with pytest.raises(DataError, match=rf"{ids[-1]}.*259"):
        byte_tokenizer.decode(ids)


def test_encode_refuses_half_a_surrogate_pair(byte_tokenizer):
    """Such a string is no text; the error says where."""
    with pytest.raises(DataError, match="at character 2"):
        byte_tokenizer.encode("ab\ud800")


def test_transformers_loads_the_folder(byte_tokenizer, tmp_path):
    """transformers gives the same ids for texts and conversations, and knows the same special tokens."""
    byte_tokenizer.save(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [peer.encode(text) for text in TEXTS] == [byte_tokenizer.encode(text) for text in TEXTS]
    assert [peer.decode(peer.encode(text)) for text in TEXTS] == TEXTS
    for generate in (False, True):
        expected = peer.apply_chat_template(CHAT, add_generation_prompt=generate, tokenize=True, return_dict=False)
        assert byte_tokenizer.apply_chat_template(CHAT, add_generation_prompt=generate) == expected
    assert (peer.eos_token_id, peer.pad_token_id, len(peer)) == (258, 256, 259)


def test_reads_a_folder_that_transformers_wrote(merged_backend, tmp_path):
    """Vocabulary, special tokens and template of a saved PreTrainedTokenizerFast are understood."""
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=merged_backend, eos_token="<|end|>", bos_token="<|start|>")
    peer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    peer.save_pretrained(tmp_path)
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (peer.eos_token_id, peer.bos_token_id, len(peer))
    assert [tokenizer.encode(text) for text in TEXTS] == [peer.encode(text) for text in TEXTS]
    assert tokenizer.apply_chat_template(CHAT) == peer.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_saving_and_reading_changes_nothing(byte_tokenizer, tmp_path):
    """The fingerprint, which covers vocabulary, special tokens and template, survives."""
    byte_tokenizer.save(tmp_path)
    again = data.Tokenizer.from_folder(tmp_path)
    again.save(tmp_path / "twice")
    twice = data.Tokenizer.from_folder(tmp_path / "twice")
    assert again.fingerprint == twice.fingerprint == byte_tokenizer.fingerprint
    assert again.encode_chat(CHAT) == byte_tokenizer.encode_chat(CHAT)


def test_template_named_default_in_the_config(byte_tokenizer, tmp_path):
    """Folders with several templates in tokenizer_config.json use the one called default."""
    byte_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "chat_template": [{"name": "default", "template": "D{{ eos_token }}"}]}'
    )
    assert data.Tokenizer.from_folder(tmp_path).apply_chat_template(CHAT) == [ord("D"), 258]


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{"}, {"vocab.json": "{}"}], ids=str)
def test_unreadable_folder(tmp_path, files):
    """A folder without a readable tokenizer.json is refused by name."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        data.Tokenizer.from_folder(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        data.Tokenizer.from_folder(tmp_path / "missing")


def test_padding_and_truncation_in_the_file_are_ignored(merged_backend, tmp_path):
    """Settings that would cut or fill texts do not reach the ids."""
    backend = type(merged_backend).from_str(merged_backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the user asks for the answer, and more than three tokens"
    ids = data.Tokenizer.from_folder(tmp_path).encode(text)
    assert ids == merged_backend.encode(text, add_special_tokens=False).ids
