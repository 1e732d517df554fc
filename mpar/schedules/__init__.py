"""Pipeline schedules: pure functions from sizes to lists of actions, and what follows from these: times, messages, proofs.

Names are imported when they are first used, because a rank that runs a compiled program needs only two of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpar.schedules._action import KINDS, Action, Actions, check_table, num_microbatches, num_stages
    from mpar.schedules._auto import Auto, Trial, auto, auto_actions
    from mpar.schedules._chrome import chrome_trace
    from mpar.schedules._dual_pipe import dual_pipe
    from mpar.schedules._dual_pipe_v import dual_pipe_v
    from mpar.schedules._forward_only import forward_only
    from mpar.schedules._from_table import from_table, to_table
    from mpar.schedules._gpipe import gpipe
    from mpar.schedules._html import html
    from mpar.schedules._interleaved import interleaved
    from mpar.schedules._layout import balance, even, layout_letters, parse_layout, stage_ranges
    from mpar.schedules._looped_bfs import looped_bfs
    from mpar.schedules._lower import Transfer, fuse, lower
    from mpar.schedules._names import SCHEDULES, NamedOrder, actions
    from mpar.schedules._one_f_one_b import one_f_one_b
    from mpar.schedules._order import Event, check_order
    from mpar.schedules._picture import Bar, Picture, from_timeline
    from mpar.schedules._svg import svg
    from mpar.schedules._timeline import Costs, Timeline, timeline
    from mpar.schedules._v_half import v_half
    from mpar.schedules._v_min import v_min
    from mpar.schedules._verify import verify
    from mpar.schedules._zbv import zbv
    from mpar.schedules._zero_bubble import zb1p, zb_h1, zb_h2

_HOME = {
    "KINDS": "_action",
    "SCHEDULES": "_names",
    "Action": "_action",
    "Actions": "_action",
    "check_table": "_action",
    "Auto": "_auto",
    "Bar": "_picture",
    "Costs": "_timeline",
    "Event": "_order",
    "NamedOrder": "_names",
    "Picture": "_picture",
    "Timeline": "_timeline",
    "Transfer": "_lower",
    "Trial": "_auto",
    "actions": "_names",
    "auto": "_auto",
    "auto_actions": "_auto",
    "balance": "_layout",
    "check_order": "_order",
    "chrome_trace": "_chrome",
    "dual_pipe": "_dual_pipe",
    "dual_pipe_v": "_dual_pipe_v",
    "even": "_layout",
    "forward_only": "_forward_only",
    "from_table": "_from_table",
    "from_timeline": "_picture",
    "fuse": "_lower",
    "gpipe": "_gpipe",
    "html": "_html",
    "interleaved": "_interleaved",
    "looped_bfs": "_looped_bfs",
    "lower": "_lower",
    "num_microbatches": "_action",
    "num_stages": "_action",
    "one_f_one_b": "_one_f_one_b",
    "layout_letters": "_layout",
    "parse_layout": "_layout",
    "stage_ranges": "_layout",
    "svg": "_svg",
    "timeline": "_timeline",
    "to_table": "_from_table",
    "v_half": "_v_half",
    "v_min": "_v_min",
    "verify": "_verify",
    "zb1p": "_zero_bubble",
    "zb_h1": "_zero_bubble",
    "zb_h2": "_zero_bubble",
    "zbv": "_zbv",
}

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "Actions",
    "Auto",
    "Bar",
    "Costs",
    "Event",
    "NamedOrder",
    "Picture",
    "Timeline",
    "Transfer",
    "Trial",
    "actions",
    "auto",
    "auto_actions",
    "balance",
    "check_order",
    "check_table",
    "chrome_trace",
    "dual_pipe",
    "dual_pipe_v",
    "even",
    "forward_only",
    "from_table",
    "from_timeline",
    "fuse",
    "gpipe",
    "html",
    "interleaved",
    "layout_letters",
    "looped_bfs",
    "lower",
    "num_microbatches",
    "num_stages",
    "one_f_one_b",
    "parse_layout",
    "stage_ranges",
    "svg",
    "timeline",
    "to_table",
    "v_half",
    "v_min",
    "verify",
    "zb1p",
    "zb_h1",
    "zb_h2",
    "zbv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mpar.schedules' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"mpar.schedules.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
