"""From rows to documents: tokens, marks on what is trained on, and the documents that a row is cut into."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpar.data._config import DataConfig
from mpar.data._template import Message, RenderError, TemplateError
from mpar.data._token_weights import TokenWeights
from mpar.data._tokenizer import Tokenizer
from mpar.data.rows import AnyRow, Row
from mpar.errors import DataError

__all__ = ["RowTokens", "SourcedRow", "Tokenise", "tokenise"]

SourcedRow = tuple[int, AnyRow]
"""The number of a source, and a row of it."""

Tokenise = tuple[DataConfig, Tokenizer]
"""What `tokenise` needs besides rows."""


Piece = tuple[int, int]
"""The tokens of a document: where they begin in their row, and where they end. It has one position less than tokens."""


@dataclass
class RowTokens:
    """What became of one row: the tokens, (T,), what each weighs in the loss, (T,), and the documents. A row without documents
    has a fault, or is too long.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_ | np.float32]
    documents: list[Piece] = field(default_factory=list)
    too_long: bool = False
    fault: str = ""


@dataclass(frozen=True)
class ChunkTokens:
    """What became of many rows, in few arrays, which go quickly between processes. Row i has `ids[ends[i - 1] : ends[i]]`."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_ | np.float32]
    ends: NDArray[np.int64]
    documents: list[list[Piece]]
    too_long: list[bool]
    faults: list[str]

    @classmethod
    def of(cls, rows: Sequence[RowTokens]) -> "ChunkTokens":
        """Those of these rows, at least one."""
        return cls(
            np.concatenate([row.ids for row in rows]),
            np.concatenate([row.trained for row in rows]),
            np.cumsum([len(row.ids) for row in rows]),
            [row.documents for row in rows],
            [row.too_long for row in rows],
            [row.fault for row in rows],
        )

    def __iter__(self) -> Iterator[RowTokens]:
        """What became of each row."""
        begin = 0
        for number, end in enumerate(self.ends.tolist()):
            ids, trained = self.ids[begin:end], self.trained[begin:end]
            yield RowTokens(ids, trained, self.documents[number], self.too_long[number], self.faults[number])
            begin = end


_Outcome = Iterator[RowTokens]


def tokenise(given: Tokenise, rows: Sequence[SourcedRow]) -> Iterable[RowTokens]:
    """What becomes of each row that is a Row, in order. Rows of other kinds are passed over.

    Raises DataError if a row is too long under `truncation=error`, TemplateError if the chat template cannot be used.
    """
    config, tokenizer = given
    usable = [row for _, row in rows if isinstance(row, Row)]
    if not usable:
        return []
    of_kind: Callable[[Sequence[Row], DataConfig, Tokenizer], _Outcome] = {
        "pt": _texts,
        "prompt": _prompts,
        "prm": _stepwise,
    }.get(config.kind, _conversations)
    return ChunkTokens.of(list(of_kind(usable, config, tokenizer)))


def _texts(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer) -> _Outcome:
    """Each text, ended by the end-of-text token, as documents of at most seq_len positions."""
    texts = [_substitute(row.text, row.text, config) for row in rows]
    eos = np.array([tokenizer.eos_id], np.int32)
    for ids in tokenizer.encode_texts(texts):
        ended = ids if len(ids) and ids[-1] == eos[0] else np.concatenate((ids, eos))
        made = RowTokens(ended, np.ones(len(ended), dtype=bool))
        if len(ended) < 2:
            made.fault = "no token"
        else:
            made.documents = _all_pieces(len(ended), config.seq_len)
        yield made


def _conversations(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer) -> _Outcome:
    """Each conversation as one document, with labels on what the assistant wrote, cut as `truncation` says if it is too long. A
    pair is two documents, the preferred one first; if one of them cannot be used, neither is.
    """
    sides = [(row.messages, row.rejected) if row.rejected else (row.messages,) for row in rows]
    conversations = [(_prepare(side, config), row.tools) for row, of_row in zip(rows, sides, strict=True) for side in of_row]
    encodings = tokenizer.encode_chats(conversations, weights=TokenWeights.parse(config.token_weights))
    for row, of_row in zip(rows, sides, strict=True):
        try:
            encoded = [next(encodings) for _ in of_row]
        except TemplateError as error:
            raise TemplateError(f"{row.where}: {error}") from error
        fault = next((error for error in encoded if isinstance(error, DataError)), None)
        if fault is not None:
            yield RowTokens(np.zeros(0, np.int32), np.zeros(0, bool), fault=str(fault))
        else:
            made = [_marked(*one, config) for one in encoded if not isinstance(one, DataError)]
            rooms = _rooms([len(one.ids) - 1 for one in made], config)
            yield _joined([_conversation(row, one, room, config) for one, room in zip(made, rooms, strict=True)])


def _prompts(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer) -> _Outcome:
    """Each question, rendered up to where its answer begins, as a document of which nothing is trained on. One of more than
    seq_len tokens is left out, whatever `truncation` says: a part of a question is another question.
    """
    for row in rows:
        prompt = _prompt_ids(row, config, tokenizer)
        if isinstance(prompt, RowTokens):
            yield prompt
            continue
        ids = np.array(prompt, np.int32)
        made = RowTokens(ids, np.zeros(len(ids), bool), too_long=len(ids) > config.seq_len)
        if len(ids) < 2:
            made.fault = "its prompt has fewer than two tokens"
        elif not made.too_long:
            made.documents = [(0, len(ids))]
        yield made


def _stepwise(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer) -> _Outcome:
    """Each question, rendered up to where its answer begins, and the steps, each ended by a line break, as one document with a
    mark on the last token of each step. Steps are tokenised by themselves, so that each ends with a token of its own."""
    for row in rows:
        prompt = _prompt_ids(row, config, tokenizer)
        if isinstance(prompt, RowTokens):
            yield prompt
            continue
        steps = row.columns["completions"]
        assert isinstance(steps, list)
        parts = [prompt, *(list(tokenizer.encode(f"{step}\n")) for step in steps)]
        ends = np.cumsum([len(part) for part in parts])
        marks = np.zeros(int(ends[-1]), bool)
        marks[ends[1:] - 1] = True
        made = _marked([token for part in parts for token in part], marks.tolist(), config)
        yield _conversation(row, made, config.seq_len, config)


def _prompt_ids(row: Row, config: DataConfig, tokenizer: Tokenizer) -> list[int] | RowTokens:
    """The tokens of a question, up to where its answer begins; or, if the template refuses it, a row with that fault."""
    try:
        text = tokenizer.render_chat(_prepare(row.messages, config), add_generation_prompt=True, tools=row.tools)
    except RenderError as error:
        return RowTokens(np.zeros(0, np.int32), np.zeros(0, bool), fault=str(error))
    return list(tokenizer.encode(text))


def _joined(made: Sequence[RowTokens]) -> RowTokens:
    """The documents of a row whose parts stand one behind the other: all of them, or none if a part has none."""
    if len(made) == 1:
        return made[0]
    begins = np.cumsum([0, *(len(part.ids) for part in made)])
    documents = [
        (start + begin, end + begin) for part, begin in zip(made, begins.tolist(), strict=False) for start, end in part.documents
    ]
    return RowTokens(
        np.concatenate([part.ids for part in made]),
        np.concatenate([part.trained for part in made]),
        documents if all(part.documents for part in made) else [],
        any(part.too_long for part in made),
        next((part.fault for part in made if part.fault), ""),
    )


def _marked(ids: Sequence[int], weights: Sequence[float], config: DataConfig) -> RowTokens:
    """The tokens of a conversation, and what each weighs. Where answers are scored, one more makes a position of the last."""
    dtype = np.bool_ if TokenWeights.parse(config.token_weights).binary else np.float32
    if config.answers is not None and config.answers.scored:
        ids, weights = [*ids, ids[-1]], [*weights, 0]
    return RowTokens(np.array(ids, dtype=np.int32), np.array(weights, dtype=dtype))


def _rooms(lengths: Sequence[int], config: DataConfig) -> list[int]:
    """The most positions that each document of a row may take. Those of a pair share a sequence, and so does a document with the
    one of another answer that will be behind it: if they do not fit, each has half of it, and the longer one what the other does
    not need."""
    multiple, seq_len = config.pad_to_multiple, config.seq_len
    half = seq_len // 2 // multiple * multiple
    if config.answers is not None and config.answers.mismatched:
        return [half for _ in lengths]
    if len(lengths) == 1:
        return [seq_len]
    rounded = [-(-length // multiple) * multiple for length in lengths]
    return [max(half, seq_len - other) for other in reversed(rounded)]


def _conversation(row: Row, made: RowTokens, room: int, config: DataConfig) -> RowTokens:
    if not made.trained[1:].any():
        made.fault = "no token to train on: the chat template renders no answer, or none has a loss"
        return made
    size = len(made.ids)
    made.too_long = size > room + 1
    if made.too_long and config.truncation == "error":
        raise DataError(
            f"cannot use {row.where}: its conversation has {size} tokens, {room + 1} fit into seq_len={config.seq_len}"
            f"{'' if room == config.seq_len else ', which it shares with another answer'}. Raise seq_len, or set truncation to "
            "drop, left, right or split."
        )
    pieces = _pieces(size, room, config)
    made.documents = [(start, end) for start, end in pieces if made.trained[start + 1 : end].any()]
    return made


def _pieces(size: int, room: int, config: DataConfig) -> list[Piece]:
    """The tokens that become documents, of a conversation of `size` tokens for which there are `room` positions."""
    longest = room + 1
    if size <= longest:
        return [(0, size)]
    if config.truncation == "right":
        return [(0, longest)]
    if config.truncation == "left":
        return [(size - longest, size)]
    return _all_pieces(size, config.seq_len) if config.truncation == "split" else []


def _all_pieces(size: int, seq_len: int) -> list[Piece]:
    """All of `size` tokens as documents of at most `seq_len` positions. Documents that were cut from one row share a token."""
    return [(start, min(start + seq_len + 1, size)) for start in range(0, size - 1, seq_len)]


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
