"""The rows of sources, read over and over, one source or another at a time: which row follows depends only on the place."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpar.data._config import DataConfig
from mpar.data._cursor import Place
from mpar.data._random import FILE_ORDER, SOURCE_ORDER, random_keys
from mpar.data._tokenise import SourcedRow
from mpar.data.reading import Mark, Record, Source, read_records
from mpar.data.rows import AnyRow, Columns, Row, row_reader
from mpar.errors import DataError

__all__ = ["StreamRows"]


class StreamRows:
    """All rows from `places` on, without end. Without weights, one source follows the other, in an order that is drawn anew each
    time. With weights, the next row is of the source that lags most behind its share. A source that has been read to its end
    begins anew. With `shuffle`, its files have another order each time; of NAME#N, the first N rows are taken, in their order.

    part: (share, chosen): of all records, about this share is chosen, by their places alone; only those that are chosen are
    read, or only the others. None: all.
    """

    def __init__(
        self, config: DataConfig, sources: Sequence[Source], places: Sequence[Place], part: tuple[float, bool] | None = None
    ) -> None:
        self.num_passed_over = 0  # records that belong to the other part
        self._config, self._sources, self._part = config, sources, part
        self._places = list(places)
        self._rows_of = row_reader(config.kind, Columns(config.columns, config.preprocess))
        self._open: list[Iterator[Record] | None] = [None] * len(sources)
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}
        self._barren = 0  # epochs since the last row that could be used

    @property
    def places(self) -> tuple[Place, ...]:
        """How far each source has been read."""
        return tuple(self._places)

    def next_rows(self) -> list[SourcedRow]:
        """The rows of the next record: often one. Raises DataError if no source has a row that can be used."""
        while True:
            source = self._next_source()
            record = self._next_record(source)
            if record is None:
                self._end_epoch(source)
                continue
            if not self._is_chosen(source, record):
                self.num_passed_over += 1
                continue
            return [(source, row) for row in self._counted(source, list(self._rows_of(record)))]

    def _next_source(self) -> int:
        if self._config.weights is not None:
            drawn = [place.drawn for place in self._places]
            at = max(1, sum(drawn))
            total = sum(self._config.weights)
            lags = [weight / total * at - count for weight, count in zip(self._config.weights, drawn, strict=True)]
            return lags.index(max(lags))
        epochs = min(place.epochs for place in self._places)
        return next(source for source in self._order_of_sources(epochs) if self._places[source].epochs == epochs)

    def _next_record(self, source: int) -> Record | None:
        """The next record of a source, None at the end of its epoch. Its place is then behind the record."""
        place, limit = self._places[source], self._sources[source].limit
        while place.file < len(self._sources[source].files) and (limit is None or place.taken < limit):
            opened = self._open[source]
            if opened is None:
                name = self._sources[source].files[self._order_of_files(source, place.epochs)[place.file]]
                opened = self._open[source] = read_records(name, place.mark)
            record = next(opened, None)
            if record is not None:
                mark = Mark(place.mark.records + 1, record.line, record.offset)
                self._places[source] = replace(place, mark=mark)
                return record
            self._open[source] = None
            place = self._places[source] = replace(place, file=place.file + 1, mark=Mark())
        return None

    def _end_epoch(self, source: int) -> None:
        place = self._places[source]
        self._open[source] = None
        self._places[source] = Place(epochs=place.epochs + 1, drawn=place.drawn)
        self._barren += 1
        if self._barren > len(self._sources):
            name = self._sources[source].name
            raise DataError(f"cannot train on {', '.join(self._config.sources)}: {name} has no row that can be used.")

    def _counted(self, source: int, rows: list[AnyRow]) -> list[AnyRow]:
        """The rows, up to as many as may be taken, counted."""
        place, limit = self._places[source], self._sources[source].limit
        kept: list[AnyRow] = []
        for row in rows:
            if isinstance(row, Row):
                if place.taken == limit:
                    break
                place = replace(place, taken=place.taken + 1, drawn=place.drawn + 1)
                self._barren = 0
            kept.append(row)
        self._places[source] = place
        return kept

    def _is_chosen(self, source: int, record: Record) -> bool:
        if self._part is None:
            return True
        share, chosen = self._part
        number = self._places[source].mark.records
        file = self._order_of_files(source, self._places[source].epochs)[self._places[source].file]
        return (_unit(source, file, number) < share) == chosen

    def _order_of_sources(self, epochs: int) -> Sequence[int]:
        return self._order(-1, len(self._sources), epochs, SOURCE_ORDER, 0, self._config.shuffle)

    def _order_of_files(self, source: int, epochs: int) -> Sequence[int]:
        found = self._sources[source]
        shuffled = self._config.shuffle and found.limit is None
        return self._order(source, len(found.files), epochs, FILE_ORDER, source, shuffled)

    def _order(self, key: int, count: int, epochs: int, purpose: int, number: int, shuffled: bool) -> Sequence[int]:
        """A permutation for each epoch, of which the last one is remembered."""
        if key not in self._orders or self._orders[key][0] != epochs:
            drawn = random_keys(count, self._config.seed, epochs, purpose, number).argsort(kind="stable").tolist()
            self._orders[key] = epochs, drawn if shuffled else range(count)
        return self._orders[key][1]


def _unit(*numbers: int) -> float:
    """A number in [0, 1) that looks drawn, and depends on `numbers` alone (the finaliser of splitmix64)."""
    word, mask = 0, 2**64 - 1
    for number in numbers:
        word = (word + number + 0x9E3779B97F4A7C15) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        word ^= word >> 31
    return word / 2**64
