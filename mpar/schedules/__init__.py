"""Pipeline schedules: pure functions from sizes to lists of actions, and what follows from a list: times, messages, proofs."""

from mpar.schedules._action import KINDS, Action, Actions
from mpar.schedules._layout import balance, even, parse_layout, stage_ranges
from mpar.schedules._lower import Transfer, fuse, lower
from mpar.schedules._order import Event, check_order
from mpar.schedules._timeline import Costs, Timeline, timeline

__all__ = [
    "KINDS",
    "Action",
    "Actions",
    "Costs",
    "Event",
    "Timeline",
    "Transfer",
    "balance",
    "check_order",
    "even",
    "fuse",
    "lower",
    "parse_layout",
    "stage_ranges",
    "timeline",
]
