"""The page about traced models names the types that tests train, and those that they see refused."""

import re
from pathlib import Path

import pytest

from tests.models.traced_kinds import EXACT, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "any_decoder.md"


@pytest.mark.parametrize(("mark", "kinds"), [("exact", EXACT), ("refused", REFUSED)])
def test_the_page_names_them(mark, kinds):
    """Behind its mark stands the sorted list."""
    found = re.search(rf"<!-- {mark} -->\n(.*)\n", PAGE.read_text(encoding="utf-8"))
    assert found is not None and found[1].split(", ") == sorted(kinds)
