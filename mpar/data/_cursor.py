"""Where a stream stands: a few numbers for each source, from which the same rows follow on any machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from mpar.data._documents import LoadReport
from mpar.data.reading import Mark
from mpar.errors import DataError

__all__ = ["Cursor", "Place", "stream_report"]


@dataclass(frozen=True)
class Place:
    """How far a source has been read.

    epochs: how often it has been read to its end. file: the place, in the order of this epoch, of the file that is being read.
    mark:   how far that file has been read.
    taken:  rows of this epoch that could be used, as far as is known before they are tokenised; drawn: of all epochs.
    """

    epochs: int = 0
    file: int = 0
    mark: Mark = field(default_factory=Mark)
    taken: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class Cursor:
    """The beginning of a block of a stream.

    block, sequence: the blocks, and the sequences of these, before it. sources: the place in each source.
    counts: the numbers of the reports of all blocks before it. digest: a hash of the documents of the block; empty: not known.
    """

    sources: tuple[Place, ...]
    block: int = 0
    sequence: int = 0
    counts: Mapping[str, object] = field(default_factory=dict)
    digest: str = ""

    @classmethod
    def beginning(cls, num_sources: int) -> "Cursor":
        """That of a stream of which nothing has been read."""
        return cls((Place(),) * num_sources)

    @property
    def epoch(self) -> int:
        """How often all sources have been read."""
        return min(place.epochs for place in self.sources)

    def __str__(self) -> str:
        """Its places, as a person reads them."""
        places = enumerate(self.sources, 1)
        return ", ".join(f"source {number}, file {at.file + 1}, row {at.mark.records + 1}" for number, at in places)

    def to_json(self) -> dict[str, object]:
        """The cursor as a value for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "Cursor":
        """The cursor that `to_json` gave. Raises DataError if it is none."""
        try:
            places = tuple(Place(**{**place, "mark": Mark(**place["mark"])}) for place in value["sources"])  # type: ignore
            return cls(**{**value, "sources": places})  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise DataError(f"cannot go on in the data: {value!r:.200} is no place in a stream ({error}).") from None

    @property
    def report(self) -> LoadReport:
        """What became of the rows of all blocks before this one, without descriptions of malformed ones."""
        return LoadReport(**self.counts)  # type: ignore[arg-type]


def stream_report(cursor: Mapping[str, object]) -> LoadReport:
    """What became of the rows of a stream before a cursor, which `Batches.cursor` gave."""
    return Cursor.from_json(cursor).report
