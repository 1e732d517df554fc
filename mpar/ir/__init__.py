"""The program as data. The compiler builds it, proofs and forecasts read it, ranks run it; this package imports none of them."""

from mpar.ir._cost import collective_time, exposed_time, link, segment_time
from mpar.ir._instruction import ALL_SLICES, Instruction, Member, Message, Piece
from mpar.ir._issue import HOME, HOST, START, Issue, plan_streams, plan_threads, queues_on_streams
from mpar.ir._kind import CollectiveUse, KernelUse, Kind, OpUse, Stretch
from mpar.ir._memory import SegmentMemory, sweep
from mpar.ir._op_time import op_time
from mpar.ir._part import STATE, Contribution, Part, SegmentResult
from mpar.ir._program import Facts, ProgramData
from mpar.ir._values import Leaf, Value

__all__ = [
    "ALL_SLICES",
    "HOME",
    "HOST",
    "START",
    "STATE",
    "CollectiveUse",
    "Contribution",
    "Facts",
    "Instruction",
    "Issue",
    "KernelUse",
    "Kind",
    "Leaf",
    "Member",
    "Message",
    "OpUse",
    "Part",
    "Piece",
    "ProgramData",
    "SegmentMemory",
    "SegmentResult",
    "Stretch",
    "Value",
    "collective_time",
    "exposed_time",
    "link",
    "op_time",
    "plan_streams",
    "plan_threads",
    "queues_on_streams",
    "segment_time",
    "sweep",
]
