"""How ranks reach each other: collectives and messages over processes and shared memory, or between threads of one process."""

from mpar.runtime.comm._lockstep import LockstepComm, run_ranks
from mpar.runtime.comm._process_comm import Counter, ProcessComm
from mpar.runtime.comm._protocol import ALONE, Comm, Posted
from mpar.runtime.comm._shared_file import ALIGN

__all__ = ["ALIGN", "ALONE", "Comm", "Counter", "LockstepComm", "Posted", "ProcessComm", "run_ranks"]
