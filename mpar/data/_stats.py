"""What data are like: how many there are of what, how long, how often the same, and how full their sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from mpar.data._batches import Batches, DocumentBatches
from mpar.data._documents import LoadReport
from mpar.errors import ConfigError

__all__ = ["DataStats", "data_stats"]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class DataStats:
    """report: what became of the rows. lengths: positions of each document. num_duplicates: documents with the tokens of an
    earlier one; None if that was not looked for. fill_ratio: the share of positions that hold data, in the sequences of an epoch.
    columns: what each column that rows have for a task says, in words.
    """

    report: LoadReport
    lengths: NDArray[np.integer]
    num_duplicates: int | None
    fill_ratio: float
    num_sequences: int
    steps_per_epoch: int
    columns: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, str]]:
        """Each number with its name, as a person reads them."""
        report, percentiles = self.report, np.percentile(self.lengths, PERCENTILES)
        share = 100 * report.num_trained / max(report.num_tokens, 1)
        at = ", ".join(f"{p} %: {value:,.0f}" for p, value in zip(PERCENTILES, percentiles, strict=True))
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in report.unused.items()) or "none"
        out = [("rows", f"{report.num_rows:,}"), ("used", f"{report.num_used:,}"), ("left out", left_out)]
        out += [
            (f"  {name}", f"{count:,} rows used, {report.tokens_of_source.get(name, 0):,} tokens")
            for name, count in report.used_of_source.items()
        ]
        out += [(f"  as {name}", f"{count:,} rows") for name, count in sorted(report.formats.items())]
        out += [(f"  with {name}", words) for name, words in self.columns.items()]
        out += [
            ("documents", f"{len(self.lengths):,}"),
            ("tokens", f"{report.num_tokens:,}, of which {report.num_trained:,} are trained on ({share:.1f} %)"),
            ("length", f"{at}, longest {int(self.lengths.max()):,}"),
        ]
        out += [] if self.num_duplicates is None else [("duplicates", f"{self.num_duplicates:,} documents")]
        return [
            *out,
            ("sequences", f"{self.num_sequences:,} an epoch, {100 * self.fill_ratio:.1f} % full"),
            ("steps", f"{self.steps_per_epoch:,} an epoch"),
        ]


def data_stats(batches: Batches) -> DataStats:
    """The statistics of all data of an epoch. Raises ConfigError if they are read as they are needed: then nobody knows them."""
    steps = batches.steps_per_epoch
    if steps is None:
        raise ConfigError("cannot count what is in a stream before it has been read. Load the data with data.stream=false.")
    if not isinstance(batches, DocumentBatches):
        return DataStats(batches.report, batches.lengths, None, 1.0, steps * batches.shape.batch_size, steps)
    duplicates, columns = _num_duplicates(batches), _columns(batches)
    return DataStats(batches.report, batches.lengths, duplicates, batches.fill_ratio, batches.num_sequences, steps, columns)


def _columns(batches: DocumentBatches) -> dict[str, str]:
    """By column, how many rows have it; of labels how many are true, of margins their mean."""
    documents = batches.documents
    rows = [documents.columns[row] for row in np.unique(documents.rows).tolist() if row in documents.columns]
    found = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        found[name] = f"{len(values):,} rows"
        if name == "label":
            found[name] += f", {sum(map(bool, values)):,} of them true"
        elif name == "margin":
            found[name] += f", {np.mean(values):.3g} on average"  # type: ignore[arg-type]
    return found


def _num_duplicates(batches: DocumentBatches) -> int:
    documents = batches.documents
    seen: set[bytes] = set()
    for start, length in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True):
        seen.add(xxhash.xxh3_128_digest(np.ascontiguousarray(documents.tokens[start : start + length + 1]).data))
    return len(documents) - len(seen)
