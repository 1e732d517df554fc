"""Pipeline schedules: pure functions from sizes to lists of actions, and what follows from a list: times, messages, proofs."""

from mpar.schedules._action import KINDS, Action, Actions
from mpar.schedules._layout import balance, even, parse_layout, stage_ranges
from mpar.schedules._timeline import Costs, Timeline, timeline

__all__ = ["KINDS", "Action", "Actions", "Costs", "Timeline", "balance", "even", "parse_layout", "stage_ranges", "timeline"]
