"""The sizes of a step that reads a cache: how many tokens it takes, of how many rows, and the pages that hold earlier tokens."""

from dataclasses import dataclass, fields

from mpar.errors import ConfigError

__all__ = ["CacheSizes"]


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of a step with a cache, and of the cache. What is not needed of a step is padding.

    tokens:        how many tokens of all rows a step takes.
    rows:          how many rows there are at one time, each in a slot; a row is a prompt and its answer.
    pages_per_row: how many pages a row may have, and so, times `page_size`, how many positions.
    page_size:     how many positions a page holds.
    num_pages:     how many pages there are, among them page 0, in which padding is written and which no row may have.
    groups:        into how many groups tokens, rows and pages are divided: all other sizes are those of one group. Data parallel
                   ranks have groups of their own.
    """

    tokens: int
    rows: int
    pages_per_row: int
    page_size: int
    num_pages: int
    groups: int = 1

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        problems = [f"{name}={size!r} must be a positive int" for name, size in wrong.items()]
        if not problems and self.num_pages < 2:
            problems.append(f"num_pages={self.num_pages} must be at least 2: page 0 is for padding")
        if problems:
            raise ConfigError("cannot make a cache of these sizes:\n  " + "\n  ".join(problems))

    @property
    def places(self) -> int:
        """The number of positions in all pages."""
        return self.num_pages * self.page_size

    @property
    def positions_per_row(self) -> int:
        """The most positions of a row."""
        return self.pages_per_row * self.page_size
