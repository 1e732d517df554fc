"""A corpus and a tokenizer for it that any machine can make: the standard library of Python, cut into rows."""

import json
import sysconfig
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = ["write_corpus", "write_short_rows", "write_tokenizer"]

_VOCABULARY = 16_384
_SKIPPED = {"site-packages", "test", "tests", "idle_test"}


def _texts(row_characters: int) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if _SKIPPED.isdisjoint(path.relative_to(root).parts))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
    return [text[start : start + row_characters] for start in range(0, len(text) - row_characters, row_characters)]


def write_corpus(file: Path, num_rows: int, row_characters: int = 1000) -> list[str]:
    """Write rows of text as lines of JSON, again from the first one if there are too few. Returns the texts."""
    texts = _texts(row_characters)
    chosen = [texts[number % len(texts)] for number in range(num_rows)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    return chosen


def write_short_rows(file: Path, num_rows: int) -> None:
    """Write rows of about a hundred characters, one at a time, each with its number."""
    with file.open("w") as lines:
        for number in range(num_rows):
            lines.write(json.dumps({"text": f"row {number} " * (5 + number % 11)}) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on a third of the corpus, and write it as a folder of Hugging Face."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_texts(1000)[::3], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
