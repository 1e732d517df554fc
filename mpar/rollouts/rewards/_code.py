"""A reward for programs: the answer is run, in a process with little time and memory."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpar.rollouts._rollout import Rollout

__all__ = ["code_runs"]

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_LIMITED = """
import resource, sys
seconds, size = int(sys.argv[1]), int(sys.argv[2])
for limit, value in (("RLIMIT_CPU", seconds), ("RLIMIT_AS", size), ("RLIMIT_FSIZE", 2**20), ("RLIMIT_CORE", 0)):
    resource.setrlimit(getattr(resource, limit), (value, value))
exec(compile(sys.stdin.read(), "answer", "exec"), {"__name__": "__main__"})
"""


def code_runs(
    rollouts: Sequence[Rollout], *, column: str = "tests", time_s: float = 5.0, memory_mb: int = 512, processes: int = 2
) -> list[float]:
    """1 for an answer whose Python program, followed by the tests in the column of its row, ends without an error, else 0.

    The program is the last fenced block of the answer, or all of it. It runs in a process of its own with an empty environment,
    in an empty folder, for at most `time_s` seconds and within `memory_mb`; `processes` run at a time. This keeps accidents
    away, not attacks: a program may still read files and use the network, so run untrusted models in a container.
    """
    texts = [f"{_program(rollout.answer)}\n{rollout.columns.get(column, '')}" for rollout in rollouts]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda text: float(_ends_well(text, time_s, memory_mb)), texts))


def _program(answer: str) -> str:
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def _ends_well(program: str, time_s: float, memory_mb: int) -> bool:
    """Whether the program ends with exit code 0 in time; `-I` keeps the user's modules and settings away."""
    command = [sys.executable, "-I", "-c", _LIMITED, str(max(1, round(time_s))), str(memory_mb * 2**20)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                input=program.encode(errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=time_s,
                cwd=folder,
                env={},
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
