"""The comparison with TRL: what mpar gives is what the page shows. TRL itself is asked by `python -m tools.trl` alone."""

import re
from pathlib import Path

from tools.trl._cases import CASES
from tools.trl._mpar import answer, save_models

PAGE = Path(__file__).parents[2] / "docs" / "post_training.md"


def test_the_page_shows_these_losses(tmp_path):
    """Every case has a line, with its loss of today to six decimals."""
    save_models(tmp_path)
    shown = dict(re.findall(r"^\| ([^|]+) \| (\d+\.\d{6}) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == {name: f"{answer(case.task, tmp_path)[0]:.6f}" for name, case in CASES.items()}
