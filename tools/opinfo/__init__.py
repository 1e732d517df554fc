"""Survey: compile torch's own samples of its operators, sharded along each dim, simulate them and compare with plain torch."""

from tools.opinfo._cases import Outcome, outcomes_of, placements, run_case
from tools.opinfo._page import PAGE, lists_of_page, reason_of, rules_table, without_rule, write_page
from tools.opinfo._samples import ENTRIES, NOT_SAMPLED, Sample, calls_of

__all__ = [
    "ENTRIES",
    "NOT_SAMPLED",
    "PAGE",
    "Outcome",
    "Sample",
    "calls_of",
    "lists_of_page",
    "outcomes_of",
    "placements",
    "reason_of",
    "rules_table",
    "run_case",
    "without_rule",
    "write_page",
]
