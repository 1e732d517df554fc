"""The table: rows in a file of JSON, and what docs/any_decoder.md shows of them."""

import datetime
import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from mpar.models.traced import load_transformers
from tools.decoders._checks import Row

__all__ = ["PAGE", "ROWS_FILE", "present_commit", "read_rows", "table", "write_rows", "write_table"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "any_decoder.md"
ROWS_FILE = ROOT / "docs" / "any_decoder.json"
BEGIN, END = "<!-- decoders: written by python -m tools.decoders table -->", "<!-- end of decoders -->"
_REASON = 160


def read_rows() -> dict[str, dict[str, object]]:
    """The rows by type."""
    return json.loads(ROWS_FILE.read_text(encoding="utf-8"))["rows"]


def present_commit() -> str:
    """The commit of the code that a row is measured with."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip()


def write_rows(rows: Mapping[str, Mapping[str, object]]) -> None:
    """Write the rows, with today's date and the versions of the libraries."""
    document = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": load_transformers().__version__,
        "rows": dict(sorted(rows.items())),
    }
    ROWS_FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def table(document: Mapping[str, object]) -> str:
    """Markdown: counts, the types that are traced, and those that are refused, with the reason."""
    given: Mapping[str, Mapping[str, object]] = document["rows"]  # type: ignore[assignment]
    fields = set(Row.__dataclass_fields__)
    rows = {name: Row(**{key: value for key, value in row.items() if key in fields}) for name, row in given.items()}  # type: ignore[arg-type]
    traced = {name: row for name, row in rows.items() if not row.load}
    counts = {
        "are traced and equal eager logits and gradients": len(traced),
        "train on fsdp2 x tp2 and pp2 and come back bit by bit": sum(row.trains for row in traced.values()),
        "have at most two messages a layer over tp=2, with nearly all matrices divided": sum(
            row.minimal for row in traced.values()
        ),
        "train on cp2 and in slices": sum(row.cp == row.slices == "" for row in traced.values()),
        "generate through a cache": sum(row.cache == "" for row in traced.values()),
    }
    lines = [
        f"Of {len(rows)} types (torch {document['torch']}, transformers {document['transformers']}, {document['date']}; two "
        f"simulated ranks, four for the first column, float64; {_commits(given)}):",
        "",
        *(f"- {count} {what}" for what, count in counts.items()),
        "",
        "| type | fsdp2 x tp2 | pp2 | messages, matrices divided | cp2 | slices | cache | experts on 2 ranks | export |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in traced.items():
        messages = "-" if row.messages is None else f"{row.messages}, {100 * (row.split or 0.0):.0f} %"
        before, behind = (row.fsdp_tp, row.pp), (row.cp, row.slices, row.cache, row.experts, row.export)
        lines.append(f"| {name} | {' | '.join([*map(_mark, before), messages, *map(_mark, behind)])} |")
    lines += ["", "| type | why it is refused |", "| --- | --- |"]
    lines += [f"| {name} | {_short(row.load)} |" for name, row in rows.items() if row.load]
    lines += ["", "| type | why it does not train on all of these meshes, or does not come back |", "| --- | --- |"]
    for name, row in traced.items():
        if not row.trains:
            reasons = (row.fsdp_tp, row.pp, row.export, str(given[name].get("raised", "")))
            lines.append(f"| {name} | {_short(next((reason for reason in reasons if reason), ''))} |")
    return "\n".join(lines)


def _commits(rows: Mapping[str, Mapping[str, object]]) -> str:
    """How many rows were measured with the code of which commit."""
    counts = Counter(str(row["commit"]) for row in rows.values())
    return ", ".join(f"{count} at commit {commit}" for commit, count in counts.most_common())


def write_table() -> None:
    """Put the table between its marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    document = json.loads(ROWS_FILE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{table(document)}\n{END}{after}", encoding="utf-8")


def _mark(said: str | None) -> str:
    return "-" if said is None else "no" if said else "yes"


def _short(reason: str) -> str:
    flat = re.sub(r"Source\(.*?\), index", "index", " ".join(reason.split()))
    flat = re.sub(r"/tmp/\w+/", "", flat).replace("|", "/").replace("<", "(").replace(">", ")")
    return flat if len(flat) <= _REASON else f"{flat[:_REASON]} ..."
