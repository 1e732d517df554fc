"""Tokenises plain text once, into a pair of Megatron's indexed files, on several processes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpar.data._chunks import chunks
from mpar.data._collect import Progress
from mpar.data._documents import LoadReport
from mpar.data._tokenizer import Tokenizer, byte_tokenizer
from mpar.data._workers import Workers
from mpar.data.megatron import IndexedWriter, dtype_for
from mpar.data.reading import find_sources
from mpar.data.rows import AnyRow, BadRow, Columns, EmptyRow, FilteredRow, Row, read_rows
from mpar.errors import ConfigError, DataError

__all__ = ["PreprocessConfig", "preprocess"]

_ROWS_AT_ONCE = 512
_CHARACTERS_AT_ONCE = 2**20
_MOST_REPORTED = 10_000


@dataclass(frozen=True)
class PreprocessConfig:
    """sources:  text, as for kind `pt`: files of plain text, and rows with a column `text` or `content`.
    out:        the files are out.bin and out.idx.
    tokenizer:  `bytes`, or a folder with a tokenizer.
    columns:    for names of columns in the files, the names by which formats know them.
    preprocess: `module:function` of one's own, as for training.
    append_eod: whether the end-of-text token follows each text that has a token.
    workers:    processes that tokenise.
    """

    sources: tuple[str, ...]
    out: str
    tokenizer: str = "bytes"
    columns: Mapping[str, str] = field(default_factory=dict)
    preprocess: str | None = None
    append_eod: bool = True
    workers: int = 1


def preprocess(config: PreprocessConfig, progress: Progress | None = None) -> LoadReport:
    """Write the documents of all sources, in their order, whatever the number of workers. A text without a character becomes a
    document without a sequence, as Megatron writes it.

    Raises ConfigError if the tokenizer has no end-of-text token, DataError if a source has no file or no text is left. Files
    that were there are replaced only once all is written.
    """
    tokenizer = _tokenizer(config.tokenizer)
    if config.append_eod and tokenizer.eos_id is None:
        raise ConfigError(
            f"cannot end texts: the tokenizer {config.tokenizer} has no end-of-text token.\n"
            "Name it as eos_token in its tokenizer_config.json, or set append_eod=false."
        )
    if config.workers < 1:
        raise ConfigError(f"cannot tokenise with workers={config.workers}: at least one process is needed.")
    sources = find_sources("pt", config.sources)
    indexed = [source.name for source in sources if source.indexed]
    if indexed:
        raise DataError(f"cannot tokenise {', '.join(indexed)}: they are indexed tokens already. Train on them as they are.")
    counts: Counter[str] = Counter()
    bad_rows: list[BadRow] = []
    rows = (row for source in sources for row in read_rows("pt", source, Columns(config.columns, config.preprocess)))
    eod = tokenizer.eos_id if config.append_eod else None
    dtype = dtype_for(tokenizer.vocab_size)
    with IndexedWriter(config.out, dtype) as writer, Workers(_encode, (tokenizer, eod), config.workers) as workers:
        for chunk, (tokens, lengths) in workers.map(chunks(rows, lambda row: row, _ROWS_AT_ONCE, _CHARACTERS_AT_ONCE)):
            writer.add(tokens, [length for length in lengths if length], [int(length > 0) for length in lengths])
            _count(chunk, lengths, counts, bad_rows)
            if progress is not None:
                progress(counts["num_rows"], writer.num_tokens)
        report = LoadReport(
            num_rows=counts["num_rows"],
            num_used=counts["num_used"],
            num_malformed=counts["num_malformed"],
            num_empty=counts["num_empty"],
            num_filtered=counts["num_filtered"],
            num_tokens=writer.num_tokens,
            num_trained=writer.num_tokens,
            num_documents=counts["num_used"],
            malformed=tuple(bad_rows),
            formats={"text": counts["num_used"]},
        )
        if not report.num_used:
            raise DataError(f"cannot tokenise {', '.join(config.sources)}: no text is left.\n{report}")
    return report


def _tokenizer(name: str) -> Tokenizer:
    return byte_tokenizer() if name == "bytes" else Tokenizer.from_folder(name)


def _texts(chunk: Sequence[AnyRow]) -> list[str]:
    """The texts of the rows that are documents; an empty one has no token."""
    return [row.text if isinstance(row, Row) else "" for row in chunk if isinstance(row, Row | EmptyRow)]


def _encode(given: tuple[Tokenizer, int | None], chunk: Sequence[AnyRow]) -> tuple[NDArray[np.integer], list[int]]:
    """The tokens of the rows of a chunk that are documents, one after the other, and the number of tokens of each of them."""
    (tokenizer, eod), texts = given, _texts(chunk)
    ids_of = [ids if text else ids[:0] for text, ids in zip(texts, tokenizer.encode_texts(texts), strict=True)]
    end = np.array([] if eod is None else [eod], np.int32)
    ended = [np.concatenate((ids, end)) if len(ids) and eod is not None and ids[-1] != eod else ids for ids in ids_of]
    flat = np.concatenate([end[:0], *ended])
    return flat.astype(dtype_for(tokenizer.vocab_size)), [len(ids) for ids in ended]


def _count(chunk: Sequence[AnyRow], lengths: Sequence[int], counts: Counter[str], bad_rows: list[BadRow]) -> None:
    """Count what became of the rows of a chunk. A text that has characters and no token is malformed."""
    sizes = iter(lengths)
    for row in chunk:
        counts["num_rows"] += 1
        if isinstance(row, EmptyRow):
            next(sizes)
            counts["num_empty"] += 1
        elif isinstance(row, FilteredRow):
            counts["num_filtered"] += 1
        elif isinstance(row, Row) and next(sizes):
            counts["num_used"] += 1
        else:
            counts["num_malformed"] += 1
            bad = row.malformed("no token") if isinstance(row, Row) else row
            if len(bad_rows) < _MOST_REPORTED and isinstance(bad, BadRow):
                bad_rows.append(bad)
