"""The page about traced models names the types that tests train, and those that they see refused."""

import json
import re
from pathlib import Path

import pytest

from tests.models.traced_kinds import EXACT, REFUSED
from tools.decoders._table import BEGIN, END, ROWS_FILE, read_rows, table

PAGE = Path(__file__).parents[2] / "docs" / "any_decoder.md"


@pytest.mark.parametrize(("mark", "kinds"), [("exact", EXACT), ("refused", REFUSED)])
def test_the_page_names_them(mark, kinds):
    """Behind its mark stands the sorted list."""
    found = re.search(rf"<!-- {mark} -->\n(.*)\n", PAGE.read_text(encoding="utf-8"))
    assert found is not None and found[1].split(", ") == sorted(kinds)


def test_the_table_is_that_of_the_rows():
    """What the page shows is what the survey has found; a type that tests train is no refusal."""
    document = json.loads(ROWS_FILE.read_text(encoding="utf-8"))
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(document)
    assert not {kind for kind in EXACT if document["rows"].get(kind, {"load": "no row"})["load"]}
    assert all(document["rows"][kind]["load"] for kind in REFUSED)


def test_every_row_has_its_reason():
    """A check that did not pass says why, and no row shows numbers that differ from those of transformers."""
    rows = [row for row in read_rows().values() if not row["load"]]
    assert rows and not [
        said for row in rows for said in row.values() if isinstance(said, str) and "that of transformers" in said
    ]
