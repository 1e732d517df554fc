"""Text that streams: it is the text of all tokens, never half a character, and never a stop text."""

import functools
import random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from mpar.data import byte_tokenizer
from mpar.infer import TextStream

BYTES = byte_tokenizer()
HARD = [
    "naive 😀 日本 é",
    "👨\u200d👩\u200d👧 family",
    "e\u0301 combining",
    "한국어 음절",
    "plain",
    "a\ufffdb",
    " two  spaces ",
    "🇩🇪🇫🇷",
    "\n\n",
]


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    """What each push gives, and the end."""
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.text(max_size=40))
def test_pushed_text_is_the_text_of_all_tokens(text):
    """Of every text, byte by byte; nothing given out before the end has half a character."""
    parts = streamed(TextStream(BYTES.decode), BYTES.encode(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_given_too(content):
    """Broken characters become U+FFFD as in the text of all tokens, and do not hold back what follows."""
    stream = TextStream(BYTES.decode)
    parts = [stream.push(token) for token in content]
    held = len(BYTES.decode(list(content))) - len("".join(parts))
    assert held <= 3
    assert "".join(parts) + stream.finish() == BYTES.decode(list(content))


def text_of(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    """The text of tokens; the tokens of bytes count as special for the library that trained them."""
    return backend.decode(ids, skip_special_tokens=False)


def word_tokenizer() -> tokenizers.Tokenizer:
    """Words with a mark for the space before them, and bytes for all that is unknown, as in Llama 2."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *names], show_progress=False)
    backend.train_from_iterator(["plain words and more words", "two spaces family combining naive"] * 4, trainer)
    return backend


@pytest.mark.parametrize("text", HARD)
def test_other_decoders_give_their_text(text):
    """A decoder that drops the first space, and writes unknown characters as bytes, with a prompt before the answer."""
    backend = word_tokenizer()
    decode = functools.partial(text_of, backend)
    prompt, ids = backend.encode("a question").ids, backend.encode("x " + text).ids[1:]
    parts = streamed(TextStream(decode, before=prompt), ids)
    whole, before = decode([*prompt, *ids]), decode(prompt)
    assert "".join(parts) == whole[len(before) :]
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_stop_texts_end_the_answer_wherever_they_lie(seed):
    """The text before the first stop text that is complete, however tokens cut it; nothing of it is given out before."""
    draw = random.Random(seed)
    text = "".join(draw.choice("ab😀\n") for _ in range(60))
    stops = [text[start : start + draw.randint(1, 4)] for start in (draw.randrange(20, 55) for _ in range(2))]
    stream = TextStream(BYTES.decode, stops)
    parts = streamed(stream, BYTES.encode(text))
    complete = min((text.index(stop) + len(stop), text.index(stop)) for stop in stops)
    assert "".join(parts) == stream.text
    assert stream.stopped_by in stops
    assert text.startswith(stream.text) and text[len(stream.text) :].startswith(stream.stopped_by)
    assert len(stream.text) <= complete[1]
    assert stream.push(97) == stream.finish() == ""


def test_what_may_begin_a_stop_text_is_held_back_and_given_at_the_end():
    """`END` is held while `ENDING` may come; it comes out when the answer ends."""
    stream = TextStream(BYTES.decode, ["ENDING"])
    assert streamed(stream, BYTES.encode("the END")) == [*"the ", "", "", "", "END"]
    assert stream.stopped_by is None
