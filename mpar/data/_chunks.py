"""Chunks: rows in lists that are tokenised at once, by one process."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mpar.data.rows import AnyRow, Row

__all__ = ["chunks"]

_Item = TypeVar("_Item")


def chunks(
    items: Iterable[_Item], row_of: Callable[[_Item], AnyRow], max_rows: int, max_characters: int
) -> Iterator[list[_Item]]:
    """Lists of at most `max_rows` items, each of which ends once its rows have more than `max_characters`."""
    chunk: list[_Item] = []
    num_characters = 0
    for item in items:
        row = row_of(item)
        chunk.append(item)
        num_characters += row.num_characters if isinstance(row, Row) else 0
        if len(chunk) == max_rows or num_characters > max_characters:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk
