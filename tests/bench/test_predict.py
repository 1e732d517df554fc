"""The rows of published speeds can be compiled as they stand, and errors are counted as the report says."""

import pytest

from bench.predict._own import CASES, Case, Timed
from bench.predict._predicted import Judged, judge, published_s
from bench.predict._report import own_summary, summary, table
from bench.predict._rows import ROLES, Row, read_rows

ROWS = read_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family} {row.number}")
def test_a_row_says_all_that_its_step_needs(row):
    assert row.role in ROLES
    assert sum(speed is not None for speed in (row.seconds, row.tokens_per_s, row.mfu)) == 1
    assert row.num_microbatches * row.rows * row.mesh.get("dp", 1) * row.mesh.get("fsdp", 1) == row.batch
    assert row.profile().peak_flops_per_s > 0
    row.made_strategy(), row.made_schedule()


def test_some_rows_were_never_fitted_to():
    assert len({row.family for row in ROWS if row.role == "judge"}) >= 12
    assert {row.hardware for row in ROWS} >= {"a100", "h100_dgx", "h100_500w", "b200"}


def test_speeds_by_tokens_and_by_mfu_are_seconds():
    by_tokens = next(row for row in ROWS if row.number == "93")
    assert published_s(by_tokens) == pytest.approx(8 * 8192 / 8 / 2930)
    by_mfu = next(row for row in ROWS if row.number == "111")
    tokens = 4 * 4096
    flops = 6 * 6.6e9 + 12 * 32 * 4096 * 4096  # per token, 6.6 G weights in matrices
    assert published_s(by_mfu) == pytest.approx(flops * tokens / (0.4975 * 989e12), rel=0.01)


def test_one_row_is_predicted_close_to_what_was_published():
    (row,) = read_rows(["41"])
    assert abs(judge(row).error) < 0.15


def judged(family: str, role: str, error: float) -> Judged:
    row = next(row for row in ROWS if row.role == role)
    return Judged(Row(**{**vars(row), "family": family}), 1.0, 1.0 + error, 0.0, 0.0)


def test_a_family_counts_once_and_a_slower_stack_after_its_factor():
    many = [judged("a", "judge", 0.1), judged("a", "judge", 0.3), judged("b", "fit", 0.05), judged("b", "judge", 0.05)]
    slower = [judged("c", "factor", 1.0), judged("c", "slower", 1.2)]
    text = summary([*many, *slower])
    assert "all families: 2, median 12.5 %" in text  # 20 % and 5 %
    assert "slower stacks, after one factor each: 1, median 10.0 %" in text
    assert len(table(many).splitlines()) == 2 + len(many)


def test_own_cases_are_thirty_of_different_names():
    assert len({case.name for case in CASES}) == len(CASES) == 30


def test_the_summary_of_own_cases():
    timed = [Timed(Case("nano", {"dp": 1}, "ddp"), predicted, (measured,)) for predicted, measured in ((1, 1), (2, 2.5), (3, 3))]
    text = own_summary(timed)
    assert "3 cases: median 0.0 %, worst 20.0 %" in text
    assert "rank correlation of 3 cases 1.00" in text
