"""Tokenizers in the files of other libraries: the ids are those of the library that each file is for."""

import base64
import importlib
import json
import sys

import pytest
import sentencepiece
import tiktoken
import transformers

from mpar import data
from mpar.errors import ConfigError, DataError

CORPUS = ["the answer is the thing that the user asks for", "user assistant system", "你好，世界", "naïve café 1 2 3 45"] * 9
TEXTS = ["the answer", " the  user ", "naïve café\n\nx", "你好", "👩 unseen\t", "ﬁ ²", "", "12345 users' 3.5"]
PIECES = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 350, "normalization_rule_name": "identity"},
    "bpe without prefix": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 350, "add_dummy_prefix": False},
    "unigram": {"model_type": "unigram", "vocab_size": 60},
    "unigram of bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 330, "remove_extra_whitespaces": False},
    "symbols": {
        "model_type": "bpe",
        "vocab_size": 70,
        "user_defined_symbols": ["<b>"],
        "control_symbols": ["<|end|>"],
        "pad_id": 3,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
}


def train(folder, **options):
    folder.mkdir(exist_ok=True)
    options = {"character_coverage": 1.0, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), **options)
    (folder / "tokenizer.vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("name", PIECES)
def test_model_of_sentencepiece(tmp_path, name):
    """Of both kinds, with and without normalisation, prefix, bytes and symbols; special tokens have their names."""
    peer = train(tmp_path, **PIECES[name])
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == [peer.encode(text) for text in TEXTS]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (peer.bos_id(), peer.eos_id(), peer.get_piece_size())
    assert tokenizer.decode(tokenizer.encode("the answer is the user")) == "the answer is the user"
    if name == "symbols":
        assert tokenizer.pad_id == peer.pad_id()
        assert tokenizer.encode("<|end|>")[-1:] == [peer.piece_to_id("<|end|>")]
        assert tokenizer.encode("<b>") == [peer.piece_to_id("<b>")]
        assert "<|end|>" in tokenizer.special_tokens and "<b>" not in tokenizer.special_tokens


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "T5Tokenizer"])
def test_class_of_transformers(tmp_path, kind):
    """A folder that names a class has the ids and special tokens that transformers gives it, from the file before any json."""
    train(tmp_path, **PIECES["bpe" if kind == "LlamaTokenizer" else "unigram"])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>"})
    )
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == [peer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert tokenizer.special == peer.special_tokens_map
    tokenizer.save(tmp_path / "saved")
    assert data.Tokenizer.from_folder(tmp_path / "saved").fingerprint == tokenizer.fingerprint


@pytest.fixture
def ranks(merged_backend):
    """The merges of a byte-level tokenizer, as ranks of tiktoken."""
    merges = json.loads(merged_backend.to_str())["model"]["merges"]
    names = data.byte_tokenizer()._backend.get_vocab()
    token_of = lambda text: bytes(names[c] for c in text)  # noqa: E731
    every = [bytes([byte]) for byte in range(256)] + [token_of(a) + token_of(b) for a, b in merges]
    return {token: rank for rank, token in enumerate(every)}


@pytest.mark.parametrize("name", ["words.tiktoken", "tokenizer.model"])
@pytest.mark.parametrize("pattern", [None, r"\w+| ?\W"])
def test_ranks_of_tiktoken(tmp_path, ranks, name, pattern):
    """With the pattern of cl100k_base or that of the config, and with added tokens, which must have the ids that it says."""
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / name).write_bytes(lines)
    config = {"added_tokens_decoder": {str(len(ranks)): {"content": "<|end|>"}}, "eos_token": "<|end|>"}
    config |= {} if pattern is None else {"pat_str": pattern}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    given = pattern or importlib.import_module("transformers.convert_slow_tokenizer").TikTokenConverter().pattern
    peer = tiktoken.Encoding("words", pat_str=given, mergeable_ranks=ranks, special_tokens={"<|end|>": len(ranks)})
    assert [tokenizer.encode(text) for text in TEXTS] == [peer.encode_ordinary(text) for text in TEXTS]
    assert tokenizer.encode("the<|end|>") == peer.encode("the<|end|>", allowed_special="all")
    assert tokenizer.eos_id == len(ranks)
    config["added_tokens_decoder"] = {"9999": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"'<\|end\|>' is token {len(ranks)}, and 9999"):
        data.Tokenizer.from_folder(tmp_path)


def test_vocabulary_and_merges(tmp_path, merged_backend):
    """GPT-2's two files are the byte-level tokenizer that they were saved from."""
    merged_backend.model.save(str(tmp_path))
    tokenizer = data.Tokenizer.from_folder(tmp_path)
    expected = [merged_backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [tokenizer.encode(text) for text in TEXTS] == expected
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}')
    named = data.Tokenizer.from_folder(tmp_path)
    assert ([named.encode(text) for text in TEXTS], named.eos_id) == (expected, merged_backend.token_to_id("<|end|>"))


@pytest.mark.parametrize(
    ("name", "content", "library"),
    [
        ("tokenizer.model", b"\n\x0e", "sentencepiece"),
        ("a.tiktoken", b"YQ== 0\n", "tiktoken"),
        ("tokenizer_config.json", b'{"tokenizer_class": "BertTokenizer"}', "transformers"),
    ],
)
def test_missing_library(tmp_path, monkeypatch, name, content, library):
    """The error names the library and what installs it."""
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}, which is not installed.\n.*'mpar\[tokenizers\]'"):
        data.Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.model": b"hello world"}, "neither a model of sentencepiece nor ranks of tiktoken"),
        ({"a.tiktoken": b"YQ== 0\n"}, "no token for 255 of the 256 bytes"),
        ({"a.tiktoken": b"YQ== 0\nYQ== x\n"}, "line 2 is not a token"),
        ({"vocab.json": b"{", "merges.txt": b""}, r"vocab\.json and merges\.txt"),
        ({"a.model": b"\n\x0e", "tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}'}, "neither a model"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer"}'}, "BertTokenizer of transformers finds no vocabulary"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "NoSuchTokenizer"}'}, "transformers"),
        ({"vocab.json": b"{}"}, r"no tokenizer\.json"),
    ],
    ids=str,
)
def test_files_that_are_none(tmp_path, files, reason):
    """What is wrong with them is said, with the file."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        data.Tokenizer.from_folder(tmp_path)
