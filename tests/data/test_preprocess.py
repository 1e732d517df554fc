"""Text to indexed files: the same bytes for any number of workers, the documents that training would read, and nothing half."""

import json

import numpy as np
import pytest

from mpar.data import DataConfig, PreprocessConfig, Tokenizer, load_dataset, preprocess
from mpar.data.megatron import IndexedTokens
from mpar.errors import ConfigError, DataError

TEXTS = ["one two", "", "three" * 40, "vier\n", "五"]


@pytest.fixture
def texts(write_rows, tmp_path):
    """A file of rows with one that is malformed, and a file of plain text."""
    (tmp_path / "plain.txt").write_text("six")
    return write_rows(*[{"text": text} for text in TEXTS[:3]], b"broken\n", *[{"body": text} for text in TEXTS[3:]]), str(
        tmp_path / "plain.txt"
    )


def test_documents_are_the_texts_in_order(texts, byte_tokenizer, tmp_path):
    """Each text with its end; one without a character has no sequence; a malformed row is counted and none."""
    seen = []
    config = PreprocessConfig(texts, str(tmp_path / "out"), columns={"body": "text"})
    report = preprocess(config, lambda rows, tokens: seen.append((rows, tokens)))
    read = IndexedTokens.open(tmp_path / "out")
    expected = [[*byte_tokenizer.encode(text), byte_tokenizer.eos_id] for text in (*TEXTS, "six") if text]
    assert [read.sequence(i).tolist() for i in range(read.num_sequences)] == expected
    assert np.diff(read.document_ends).tolist() == [1, 0, 1, 1, 1, 1] and read.tokens.dtype == np.uint16
    assert (report.num_rows, report.num_used, report.num_empty, report.num_malformed) == (7, 5, 1, 1)
    assert seen[-1] == (7, report.num_tokens) == (7, len(read.tokens))


def test_workers_write_the_same_bytes(texts, tmp_path):
    """Two processes write what one does, without ends of texts too."""
    for workers in (1, 2):
        preprocess(PreprocessConfig(texts, str(tmp_path / f"by{workers}"), append_eod=False, workers=workers))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"by1.{suffix}").read_bytes() == (tmp_path / f"by2.{suffix}").read_bytes()


def test_training_reads_the_same_tokens(texts, byte_tokenizer, tmp_path):
    """A run on the files reads every token of the texts, ends included, each once an epoch up to the last sample."""
    preprocess(PreprocessConfig(texts, str(tmp_path / "out"), columns={"body": "text"}))
    options = {"kind": "pt", "sources": (str(tmp_path / "out"),), "batch_size": 1, "seq_len": 16}
    batches = load_dataset(DataConfig(**options), byte_tokenizer)
    tokens = sorted(int(i) for step in range(batches.steps_per_epoch) for i in batches.batch(step)["tokens"][0])
    stored = sorted(IndexedTokens.open(tmp_path / "out").tokens.tolist())
    assert len(tokens) == len(stored) - 1 - (len(stored) - 1) % 16
    assert all(tokens.count(i) <= stored.count(i) for i in set(tokens))
    documents = batches.batch(0)["documents"][0]
    assert documents.tolist() == sorted(documents.tolist())
    with pytest.raises(DataError, match="kind sft cannot read"):
        load_dataset(DataConfig(**{**options, "kind": "sft"}), byte_tokenizer)
    with pytest.raises(DataError, match="reads one or the other"):
        load_dataset(DataConfig(**{**options, "sources": (*options["sources"], texts[1])}), byte_tokenizer)


def test_a_split_keeps_sequences_apart(tmp_path, byte_tokenizer, write_rows):
    """The last sequences are held out, as many as the fraction says, and read once, whatever the number of samples."""
    path = write_rows(*[{"text": chr(97 + i) * 15} for i in range(10)])
    preprocess(PreprocessConfig((path,), str(tmp_path / "out")))
    config = DataConfig(kind="pt", sources=(str(tmp_path / "out"),), batch_size=1, seq_len=15, num_samples=40)
    training, held_out = load_dataset(config, byte_tokenizer).split(0.3)
    letters = [
        {chr(i) for step in range(side.steps_per_epoch) for i in side.batch(step)["tokens"][0].tolist() if i < 256}
        for side in (training, held_out)
    ]
    assert letters[0] <= set("abcdefg") and letters[1] <= set("hij") and letters[1]
    assert (training.num_samples >= 40, held_out.num_samples) == (True, 3)
    assert training.report.num_held_out == 3


def test_what_is_refused(texts, tmp_path, merged_backend):
    """No tokenizer's end of text, no text, tokens in place of text: nothing is written, and files that were there stay."""
    (tmp_path / "out.bin").write_bytes(b"kept")
    Tokenizer(merged_backend, special={}).save(tmp_path / "endless")
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        preprocess(PreprocessConfig(texts, str(tmp_path / "out"), str(tmp_path / "endless")))
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"text": ""}) + "\n")
    with pytest.raises(DataError, match="no text is left"):
        preprocess(PreprocessConfig((str(empty),), str(tmp_path / "out")))
    assert (tmp_path / "out.bin").read_bytes() == b"kept" and not (tmp_path / "out.idx").exists()
    preprocess(PreprocessConfig(texts, str(tmp_path / "tokens")))
    with pytest.raises(DataError, match="indexed tokens already"):
        preprocess(PreprocessConfig((str(tmp_path / "tokens"),), str(tmp_path / "again")))
    with pytest.raises(ConfigError, match="workers=0"):
        preprocess(PreprocessConfig(texts, str(tmp_path / "again"), workers=0))


def test_ids_outside_the_vocabulary_stop_a_run(texts, tmp_path, byte_tokenizer):
    """A model with a smaller vocabulary than that of the file is refused where such an id is read, with both numbers."""
    preprocess(PreprocessConfig(texts, str(tmp_path / "out")))
    config = DataConfig(kind="pt", sources=(str(tmp_path / "out"),), batch_size=1, seq_len=16)
    batches = load_dataset(config, byte_tokenizer, vocab_size=100)
    with pytest.raises(DataError, match=r"its ids reach from \d+ to \d+, and the model's vocabulary has 100"):
        for step in range(batches.steps_per_epoch):
            batches.batch(step)
