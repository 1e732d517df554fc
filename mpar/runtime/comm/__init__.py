"""Communication of ranks: collectives and messages between processes, through shared memory, or between threads."""

from mpar.runtime.comm._exchange import exchange
from mpar.runtime.comm._lockstep import LockstepComm, run_ranks
from mpar.runtime.comm._process_comm import Counter, ProcessComm
from mpar.runtime.comm._protocol import ALONE, Comm, Posted
from mpar.runtime.comm._shared_file import ALIGN

__all__ = ["ALIGN", "ALONE", "Comm", "Counter", "LockstepComm", "Posted", "ProcessComm", "exchange", "run_ranks"]
