"""Tokenizers and writers of data files."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mpar import data


@pytest.fixture(scope="session")
def byte_tokenizer():
    return data.byte_tokenizer()


@pytest.fixture(scope="session")
def merged_backend():
    """A byte-level BPE with merges, whose offsets leave out white space, as GPT-2's and Llama 3's do."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the answer is the thing that the user asks for", "user assistant system <s> [INST]"] * 20, trainer
    )
    return backend


@pytest.fixture
def write_rows(tmp_path):
    """Write values (or raw bytes) as lines of a .jsonl file; returns its path."""

    def write(*rows, name="rows.jsonl"):
        path = Path(tmp_path) / name
        path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
        return str(path)

    return write
