"""The program as data. The compiler builds it, proofs and forecasts read it, ranks run it; this package imports none of them."""

from mpar.ir._cost import collective_time, link, segment_time
from mpar.ir._instruction import ALL_SLICES, Instruction, Message, Piece
from mpar.ir._kind import CollectiveUse, KernelUse, Kind
from mpar.ir._memory import SegmentMemory, sweep
from mpar.ir._part import Contribution, Part, SegmentResult
from mpar.ir._program import Facts, ProgramData
from mpar.ir._values import Leaf, Value

__all__ = [
    "ALL_SLICES",
    "CollectiveUse",
    "Contribution",
    "Facts",
    "Instruction",
    "KernelUse",
    "Kind",
    "Leaf",
    "Message",
    "Part",
    "Piece",
    "ProgramData",
    "SegmentMemory",
    "SegmentResult",
    "Value",
    "collective_time",
    "link",
    "segment_time",
    "sweep",
]
