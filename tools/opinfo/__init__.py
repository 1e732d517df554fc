"""Survey: compile torch's own samples of its operators, sharded along each dim, simulate them and compare with plain torch."""

from tools.opinfo._cases import Outcome, outcomes_of, placements, run_case
from tools.opinfo._samples import ENTRIES, NOT_SAMPLED, Sample, calls_of

__all__ = ["ENTRIES", "NOT_SAMPLED", "Outcome", "Sample", "calls_of", "outcomes_of", "placements", "run_case"]
