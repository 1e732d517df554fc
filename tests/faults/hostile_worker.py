"""Runs commands of mpar, each in a fork: reads a line of JSON with the arguments, prints one with what became of the command."""

import json
import os
import signal
import sys
import time

from mpar.cli import _generate, _train, main  # noqa: F401  (imported once, for all forks)

PATIENCE_S = 60  # of a fork; a refusal takes less than 5 s on an idle machine


def run(arguments: list[str], out: int) -> None:
    """The command in this process, with its output going to `out`. Never returns."""
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.alarm(PATIENCE_S)
    code = 99
    try:
        code = main.main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """A fork for each line of stdin, one after the other."""
    for line in sys.stdin:
        with open(os.memfd_create("output"), "r+b") as output:
            began = time.perf_counter()
            child = os.fork()
            if child == 0:
                run(json.loads(line), output.fileno())
            _, status, usage = os.wait4(child, 0)
            output.seek(0)
            result = {
                "code": os.waitstatus_to_exitcode(status),
                "output": output.read().decode("utf-8", "replace"),
                "wall_s": time.perf_counter() - began,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "rss_bytes": usage.ru_maxrss * 1024,
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    serve()
