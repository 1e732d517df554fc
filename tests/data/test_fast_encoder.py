"""The fast encoder: it gives the ids of the tokenizer, and is not used where it would not."""

import pickle

import gigatoken
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from mpar.data import Tokenizer, byte_tokenizer
from mpar.data._fast_encoder import fast_encoder

TEXTS = ["plain words and more words", "def f(x):\n    return x", "naïve 日本 😀", " two  spaces ", "a\n\n\nb", "12345 6,789.00"]


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small byte-level BPE, as it is, or with a token before each text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "<e>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    if kind == "around":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A <e>", special_tokens=[("<s>", 0), ("<e>", 1)])
    return backend


@pytest.mark.parametrize("kind", ["plain", "around"])
@given(texts=st.lists(st.text(max_size=30) | st.sampled_from([*TEXTS, "a<s>b", "<e>"]), min_size=1, max_size=6))
def test_ids_are_those_of_the_tokenizer(kind, texts):
    """Of any texts, empty ones and ones with special tokens in them too."""
    backend = trained(kind)
    encode = fast_encoder(backend, TEXTS, ["<s>", "<e>"])
    assert encode is not None
    found = encode([text.encode() for text in texts])
    assert [ids.tolist() for ids in found] == [e.ids for e in backend.encode_batch(texts, add_special_tokens=True)]
    assert all(ids.dtype == np.int32 for ids in found)


def test_a_tokenizer_of_another_kind_is_encoded_by_its_own_library():
    """One by whole words, which gigatoken does not know."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert fast_encoder(backend, ["a b"], []) is None
    assert [ids.tolist() for ids in Tokenizer(backend, special={}).encode_texts(["a b", "b c"])] == [[0, 1], [1, 2]]


def test_other_ids_are_found_out(monkeypatch):
    """An encoder that gives one wrong id for a text of the sample is not used."""
    backend = trained("plain")
    right = gigatoken.Tokenizer.encode_batch
    assert fast_encoder(backend, TEXTS, []) is not None

    def wrong(self, texts, **how):
        ragged = right(self, texts, **how)
        return ragged + (np.arange(len(texts)) == 2)[:, None]

    monkeypatch.setattr(gigatoken.Tokenizer, "encode_batch", wrong)
    assert fast_encoder(backend, TEXTS, []) is None


def test_a_tokenizer_can_go_to_another_process():
    """After it has encoded, too."""
    tokenizer = byte_tokenizer()
    first = [ids.tolist() for ids in tokenizer.encode_texts(TEXTS)]
    assert first == tokenizer.encode_batch(TEXTS)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert [ids.tolist() for ids in again.encode_texts(TEXTS)] == first
