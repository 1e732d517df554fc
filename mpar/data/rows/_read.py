"""Rows of sources: the columns of each record are renamed as the user says, and their format is recognised."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mpar.data._mix import choose
from mpar.data.reading import Record, Source, read_records
from mpar.data.rows._conversation import conversation, keys_of
from mpar.data.rows._message import Media, check_unicode
from mpar.data.rows._preference import labelled, preference
from mpar.data.rows._preprocess import Preprocess, preprocess_function
from mpar.data.rows._prompt import prompt
from mpar.data.rows._row import BadRow, EmptyRow, FilteredRow, MediaRow, Row, RowFault
from mpar.data.rows._stepwise import stepwise
from mpar.errors import brief

__all__ = ["AnyRow", "Columns", "read_rows", "row_reader"]

AnyRow = Row | BadRow | EmptyRow | MediaRow | FilteredRow


@dataclass(frozen=True)
class Columns:
    """What the columns of a record become before its format is recognised.

    names: for names of columns in the files, the names that formats have. preprocess: `module:function` of the user's own.
    met: how many records so far have a column of each of these names.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    preprocess: str | None = None
    met: Counter[str] = field(default_factory=Counter)


def read_rows(kind: str, source: Source, columns: Columns) -> Iterator[AnyRow]:
    """The rows of a source in the order of its files; with a limit, a fixed choice of that many usable rows.

    If the limit is above the number of usable rows, rows are repeated: all equally often, give or take one. The choice depends
    only on these two numbers.
    """
    rows_of = row_reader(kind, columns)
    rows = (row for file in source.files for record in read_records(file) for row in rows_of(record))
    if source.limit is None:
        yield from rows
        return
    usable: list[Row] = []
    for row in rows:
        if isinstance(row, Row):
            usable.append(row)
        else:
            yield row
    if usable:
        yield from (usable[i] for i in choose(source.limit, len(usable)))


def row_reader(kind: str, columns: Columns) -> Callable[[Record], Iterator[AnyRow]]:
    """A function that gives the rows that a record stands for. Raises ConfigError if `columns.preprocess` cannot be imported."""
    preprocess = preprocess_function(columns.preprocess)
    return lambda record: _rows(kind, record, columns, preprocess)


def _rows(kind: str, record: Record, columns: Columns, preprocess: Preprocess) -> Iterator[AnyRow]:
    """The rows that a record stands for: one, unless the user's function makes none or several of it."""
    value = record.value
    try:
        if isinstance(value, ValueError):
            raise RowFault(str(value))
        if isinstance(value, str) and record.line == 0:  # the entire file
            yield Row(record.file, record.line, "file", text=value, excerpt=record.excerpt) if value else EmptyRow()
            return
        if not isinstance(value, dict):
            raise RowFault(f"it is a JSON {type(value).__name__}, not an object")
        columns.met.update(columns.names.keys() & value.keys())
        made = preprocess(_renamed(value, columns.names))
    except RowFault as fault:
        yield BadRow(record.file, record.line, str(fault), record.excerpt)
        return
    if not made:
        yield FilteredRow()
    for one in made:
        yield _row(kind, record, one)


def _row(kind: str, record: Record, value: Mapping[str, object]) -> AnyRow:
    """The row that the columns `value` of a record are."""
    try:
        if kind == "pt":
            text = _plain_text(value)
            return Row(record.file, record.line, "text", text=text, excerpt=record.excerpt) if text else EmptyRow()
        if kind == "prompt":
            asked = prompt(value)
            return Row(record.file, record.line, **vars(asked), excerpt=record.excerpt)
        if kind == "prm":
            return Row(record.file, record.line, **vars(stepwise(value)), excerpt=record.excerpt)
        if kind in ("preference", "kto"):
            judged = preference(value) if kind == "preference" else labelled(value)
            return Row(record.file, record.line, **vars(judged), excerpt=record.excerpt)
        name, messages, tools = conversation(value)
        return Row(record.file, record.line, name, messages=messages, tools=tools, excerpt=record.excerpt)
    except Media:
        return MediaRow()
    except RowFault as fault:
        return BadRow(record.file, record.line, str(fault), record.excerpt)


def _renamed(value: Mapping[str, object], columns: Mapping[str, str]) -> Mapping[str, object]:
    """`value` with the names of formats. A column whose own name is that of another's new name gives way to it."""
    if not columns:
        return value
    taken = {columns[name] for name in value if name in columns}
    others = {name: item for name, item in value.items() if name not in columns and name not in taken}
    return others | {columns[name]: item for name, item in value.items() if name in columns}


def _plain_text(value: Mapping[str, object]) -> str:
    text = value.get("text", value.get("content"))
    if not isinstance(text, str):
        named = brief(text) if "text" in value or "content" in value else "no column"
        raise RowFault(f"{named} under 'text' or 'content', where a string is wanted; its columns are {keys_of(value)}")
    check_unicode(text)
    return text
