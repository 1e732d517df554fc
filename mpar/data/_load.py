"""Makes batches from a data configuration: finds files, reads rows, tokenises them, and lays documents out in sequences."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from mpar.data._batches import Batches, BatchShape
from mpar.data._cache import entry_folder, load_entry, save_entry
from mpar.data._documents import Documents, LoadReport
from mpar.data._rows import SELF_COGNITION, BadRow, EmptyRow, Row, Source, find_sources, read_rows
from mpar.data._template import Message, TemplateError
from mpar.data._tokenizer import Tokenizer
from mpar.errors import ConfigError, DataError
from mpar.files import Unreadable, open_regular

__all__ = ["DataConfig", "Progress", "load_dataset"]

Progress = Callable[[int, int], None]
"""A function that is called now and then with (rows read, tokens made) so far."""

_CACHE_FORMAT = 2  # to be raised when a change of the code makes other documents of the same rows
_ROWS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 2**23
_MOST_REPORTED = 10_000  # malformed rows that the report describes; it counts all
_MOST_OF_REASON = 500  # characters
_MOST_LISTED = 10  # malformed rows in an error
_ENOUGH_MALFORMED = 1000  # malformed rows before any that can be used: this is no data
_CHOICES = {"kind": ("sft", "pt"), "truncation": ("drop", "truncate", "error"), "loss": ("all", "last_round")}


@dataclass(frozen=True)
class DataConfig:
    """The data to train on, and the shape of their batches.

    kind: `sft` are conversations, with the loss on what the assistant wrote. `pt` is plain text, with the loss on every token;
        each text ends with the end-of-text token and is cut into documents of `seq_len` positions.
    sources: files, globs, `self-cognition` or `python-stdlib`; `NAME#N` takes N rows of a source.
    batch_size, seq_len: rows and positions of the global batch. A document of S + 1 tokens fits into S positions, because its
        last token is only a label.
    seed: seed of the order. shuffle: use a new order in every epoch.
    packing: several documents share a sequence, without attending to each other.
    truncation: what to do with longer conversations: `drop` them, `truncate` (cut off the end), or raise an `error`.
    loss: train on `all` answers of a conversation, or on those of the `last_round`.
    system: system message for conversations that have none.
    model_name, model_author: replace {{NAME}} and {{AUTHOR}}. Of a pair (Chinese, English), Chinese rows get the first.
    cache_dir: folder that keeps tokenised documents. Its entries are keyed by the files' content and by all that documents
        depend on.
    strict: a malformed row is an error.
    """

    kind: str
    sources: tuple[str, ...]
    batch_size: int
    seq_len: int
    seed: int = 0
    packing: bool = True
    shuffle: bool = True
    truncation: str = "drop"
    loss: str = "all"
    system: str | None = None
    model_name: str | tuple[str, str] | None = None
    model_author: str | tuple[str, str] | None = None
    cache_dir: str | None = None
    strict: bool = False


def load_dataset(
    config: DataConfig, tokenizer: Tokenizer, *, vocab_size: int | None = None, progress: Progress | None = None
) -> Batches:
    """Read and tokenise the sources, and lay their documents out in batches. `Batches.report` says what became of the rows.

    vocab_size: that of the model (default: of the tokenizer), against which all ids are checked. Rows that cannot be used are
    counted in the report, which describes the first ten thousand of them.

    An entry of the cache that is damaged, or that others than its owner could have written, is made anew, and the report says so.

    Raises ConfigError listing every setting that does not hold, DataError if a source has no file, no row is left, a row is
    too long under `truncation=error`, a row is malformed and `strict` is set, an id is outside the vocabulary, or the entry of
    the cache belongs to somebody else; TemplateError if the chat template cannot be used.
    """
    _check(config, tokenizer)
    sources = find_sources(config.kind, config.sources)
    folder: Path | None = None
    found: tuple[Documents, LoadReport] | str = ""
    key = ""
    if config.cache_dir is not None:
        key = _cache_key(config, tokenizer, sources)
        folder = entry_folder(Path(config.cache_dir), key)
        found = load_entry(folder, key)
    if isinstance(found, str):
        documents, report = _Collector(config, tokenizer, progress).run(sources)
        if folder is not None:
            save_entry(folder, key, documents, report, replaced=bool(found))
        report = replace(report, notice=found)
    else:
        documents, report = found
    if config.strict and report.malformed:
        raise DataError(_refusal(config, report))
    pad_id = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_id
    return Batches(
        documents,
        BatchShape(config.batch_size, config.seq_len, config.packing),
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        pad_id=0 if pad_id is None else pad_id,
        seed=config.seed,
        shuffle=config.shuffle,
        report=report,
    )


def _refusal(config: DataConfig, report: LoadReport) -> str:
    listed = "\n".join(f"  {row}" for row in report.malformed[:_MOST_LISTED])
    return (
        f"cannot train on {', '.join(config.sources)} with data.strict=true: there are malformed rows. The first:\n{listed}\n"
        "Correct or delete them; data.strict=false leaves malformed rows out and lists them in malformed.jsonl."
    )


def _check(config: DataConfig, tokenizer: Tokenizer) -> None:
    faults = [
        f"{name}={getattr(config, name)!r} is none of {', '.join(known)}"
        for name, known in _CHOICES.items()
        if getattr(config, name) not in known
    ]
    faults += [f"{name}={getattr(config, name)} is below 1" for name in ("batch_size", "seq_len") if getattr(config, name) < 1]
    faults += [f"seed={config.seed} is negative"] * (config.seed < 0)
    for name in ("model_name", "model_author"):
        value = getattr(config, name)
        texts = value if isinstance(value, tuple) else (value, value)
        if value is not None and (len(texts) != 2 or not all(isinstance(text, str) and text for text in texts)):
            faults.append(f"{name}={value!r} is neither a text nor a pair (Chinese, English) of texts")
        elif value is None and any(re.fullmatch(rf"{SELF_COGNITION}(#\d+)?", source) for source in config.sources):
            faults.append(f"{name} is missing, which the source {SELF_COGNITION} needs")
    if config.kind == "sft" and tokenizer.template is None:
        faults.append("kind='sft' needs a tokenizer with a chat template; put a chat_template.jinja into its folder")
    if config.kind == "pt" and tokenizer.eos_id is None:
        faults.append("kind='pt' needs a tokenizer with an end-of-text token; name it as eos_token in its tokenizer_config.json")
    if faults:
        raise ConfigError("cannot load the data:\n" + "\n".join(faults))


def _cache_key(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> str:
    """A hash of everything that the documents depend on. Batch size, seed and packing do not matter for them."""
    digest = hashlib.sha256()
    settings = (
        _CACHE_FORMAT, config.kind, config.seq_len, config.truncation, config.loss, config.system,
        config.model_name, config.model_author, tokenizer.fingerprint,
    )  # fmt: skip
    digest.update(json.dumps(settings).encode())
    for source in sources:
        digest.update(json.dumps([source.name, source.limit, [str(path) for path in source.files]]).encode())
        for path in source.files:
            try:
                with open_regular(path) as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except (OSError, Unreadable) as error:
                digest.update(f"{error}".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


class _Kept:
    """The documents that have been read so far, as lists; `documents` makes flat arrays of them."""

    def __init__(self) -> None:
        self.tokens: list[NDArray[np.int32]] = []
        self.trained: list[NDArray[np.bool_]] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.rows: list[int] = []
        self.names: dict[str, int] = {}
        self.num_tokens = 0

    def append(self, row: Row, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> int:
        """Add the tokens of a row; returns the index of the first."""
        base = self.num_tokens
        self.tokens.append(ids)
        self.trained.append(trained)
        self.num_tokens += len(ids)
        self.names.setdefault(row.where, len(self.names))
        return base

    def add_document(self, row: Row, start: int, length: int) -> None:
        """Add a document of a row whose tokens have been added."""
        self.starts.append(start)
        self.lengths.append(length)
        self.rows.append(self.names[row.where])

    def documents(self) -> Documents:
        """All documents that were added, at least one."""
        return Documents(
            tokens=np.concatenate(self.tokens),
            trained=np.concatenate(self.trained),
            starts=np.array(self.starts, dtype=np.int64),
            lengths=np.array(self.lengths, dtype=np.int64),
            rows=np.array(self.rows, dtype=np.int64),
            names=tuple(self.names),
        )

    def num_trained(self) -> int:
        """Positions of documents whose next token is trained on."""
        trained = np.concatenate(self.trained) if self.trained else np.zeros(0, dtype=bool)
        sums = np.concatenate([[0], np.cumsum(trained)])
        starts, lengths = np.array(self.starts, dtype=np.int64), np.array(self.lengths, dtype=np.int64)
        return int((sums[starts + lengths + 1] - sums[starts + 1]).sum())


class _Collector:
    """Reads all sources once, collects their documents, and counts for the report."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, progress: Progress | None):
        self.config, self.tokenizer, self.progress = config, tokenizer, progress
        self.kept = _Kept()
        self.counts: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.bad_rows: list[BadRow] = []

    def run(self, sources: Sequence[Source]) -> tuple[Documents, LoadReport]:
        rows = (row for source in sources for row in read_rows(self.config.kind, source))
        try:
            self.add_all(rows)
        finally:
            self.tokenizer.close()
        if not self.kept.starts:
            raise self.nothing_left("no document is left")
        return self.kept.documents(), self.report()

    def add_all(self, rows: Iterable[Row | BadRow | EmptyRow]) -> None:
        """Add every row that can be used. Raises DataError as soon as it is clear that the rows are not what they should be."""
        for usable in self.batches_of_usable(rows):
            (self.add_texts if self.config.kind == "pt" else self.add_conversations)(usable)
            if self.progress is not None:
                self.progress(self.counts["num_rows"], self.kept.num_tokens)
            if self.config.strict and self.counts["num_malformed"] >= _MOST_LISTED:
                raise DataError(_refusal(self.config, self.report()))
            if self.counts["num_malformed"] >= _ENOUGH_MALFORMED and not self.counts["num_used"]:
                raise self.nothing_left("every row so far is malformed, and reading stopped")

    def nothing_left(self, problem: str) -> DataError:
        return DataError(f"cannot train on {', '.join(self.config.sources)}: {problem}.\n{self.report()}")

    def batches_of_usable(self, rows: Iterable[Row | BadRow | EmptyRow]) -> Iterator[list[Row]]:
        """Count rows, and yield those that can be tokenised in batches of some hundred rows and a few million characters."""
        usable: list[Row] = []
        num_rows = num_characters = 0
        for row in rows:
            num_rows += 1
            if self.usable(row):
                usable.append(row)
                num_characters += row.num_characters
            if num_rows == _ROWS_AT_ONCE or num_characters > _CHARACTERS_AT_ONCE:
                yield usable
                usable, num_rows, num_characters = [], 0, 0
        if num_rows:
            yield usable

    def report(self) -> LoadReport:
        return LoadReport(
            num_rows=self.counts["num_rows"],
            num_used=self.counts["num_used"],
            num_malformed=self.counts["num_malformed"],
            num_empty=self.counts["num_empty"],
            num_too_long=self.counts["num_too_long"],
            num_dropped=self.counts["num_dropped"],
            malformed=tuple(self.bad_rows),
            num_documents=len(self.kept.starts),
            num_tokens=sum(self.kept.lengths),
            num_trained=self.kept.num_trained(),
            formats=dict(self.formats),
        )

    def usable(self, row: Row | BadRow | EmptyRow) -> TypeGuard[Row]:
        """Count the row. Returns whether it can be tokenised."""
        self.counts["num_rows"] += 1
        if isinstance(row, BadRow):
            self.malformed(row)
        elif isinstance(row, EmptyRow):
            self.counts["num_empty"] += 1
        return isinstance(row, Row)

    def malformed(self, row: BadRow) -> None:
        self.counts["num_malformed"] += 1
        if len(self.bad_rows) < _MOST_REPORTED:
            self.bad_rows.append(replace(row, reason=row.reason[:_MOST_OF_REASON]))

    def add_texts(self, rows: Sequence[Row]) -> None:
        """Add each text, ended by the end-of-text token, as documents of at most seq_len positions."""
        eos_id = self.tokenizer.eos_id
        texts = [_substitute(row.text, row.text, self.config) for row in rows]
        for row, ids in zip(rows, self.tokenizer.encode_batch(texts, add_special_tokens=True), strict=True):
            ended = ids if ids and ids[-1] == eos_id else [*ids, eos_id]
            if len(ended) < 2:
                self.malformed(row.malformed("no token"))
                continue
            base = self.append(row, np.array(ended, dtype=np.int32), np.ones(len(ended), dtype=bool))
            for start in range(0, len(ended) - 1, self.config.seq_len):
                self.kept.add_document(row, base + start, min(self.config.seq_len, len(ended) - 1 - start))

    def add_conversations(self, rows: Sequence[Row]) -> None:
        """Add each conversation as one document, with labels on what the assistant wrote."""
        conversations = [(_prepare(row.messages, self.config), row.tools) for row in rows]
        encodings = self.tokenizer.encode_chats(conversations, last_round=self.config.loss == "last_round")
        for row in rows:
            try:
                encoded = next(encodings)
            except TemplateError as error:
                raise TemplateError(f"{row.where}: {error}") from error
            if isinstance(encoded, DataError):
                self.malformed(row.malformed(str(encoded)))
                continue
            ids, trained = encoded
            longest = self.config.seq_len + 1
            if len(ids) > longest:
                self.counts["num_too_long"] += 1
                if self.config.truncation == "error":
                    raise DataError(
                        f"cannot use {row.where}: its conversation has {len(ids)} tokens, {longest} fit into seq_len="
                        f"{self.config.seq_len}. Raise seq_len, or set truncation to drop or truncate."
                    )
                if self.config.truncation == "drop" or not any(trained[1:longest]):
                    self.counts["num_dropped"] += 1
                    continue
            if not any(trained[1:longest]):
                self.malformed(row.malformed("no token to train on: the chat template renders no answer"))
                continue
            base = self.append(row, np.array(ids[:longest], dtype=np.int32), np.array(trained[:longest], dtype=bool))
            self.kept.add_document(row, base, min(len(ids), longest) - 1)

    def append(self, row: Row, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> int:
        """Count a row as used and add its tokens; returns the index of the first."""
        self.counts["num_used"] += 1
        self.formats[row.format] += 1
        return self.kept.append(row, ids, trained)


def _prepare(messages: Sequence[Message], config: DataConfig) -> list[Message]:
    """The messages, with `config.system` if they have no system message, and with names in place of placeholders."""
    if config.system is not None and all(message["role"] not in ("system", "developer") for message in messages):
        messages = [{"role": "system", "content": config.system}, *messages]
    full_text = "".join(str(message["content"]) for message in messages)
    return [{**message, "content": _substitute(str(message["content"]), full_text, config)} for message in messages]


def _substitute(text: str, row: str, config: DataConfig) -> str:
    """`text` with model_name and model_author put in: the Chinese ones if `row` has any Chinese character."""
    which = 0 if re.search("[\u4e00-\u9fff]", row) else 1
    for placeholder, value in (("{{NAME}}", config.model_name), ("{{AUTHOR}}", config.model_author)):
        if value is not None:
            text = text.replace(placeholder, value if isinstance(value, str) else value[which])
    return text
