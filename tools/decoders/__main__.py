"""The command line of the survey of decoders."""

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tools import decoders
from tools.decoders._checks import survey
from tools.decoders._configs import causal_types
from tools.decoders._table import ROWS_FILE, present_commit, read_rows, write_rows, write_table

LIMIT_S = 240.0
_FIRST = "arcee"


def main() -> int:
    """Do what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.decoders", description=decoders.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="after this many seconds a type is given up")
    options = parser.parse_args()
    if options.what == "table":
        write_table()
        return 0
    torch.set_num_threads(1)  # a child that is forked from a process with threads could wait for a lock for ever
    survey(_FIRST, lambda row: None)  # children need not import again what this has imported
    commit = present_commit()
    rows = read_rows() if ROWS_FILE.exists() else {}
    for name in options.types or causal_types():
        start = time.perf_counter()
        rows[name] = {**_in_a_child(name, options.limit_s), "commit": commit}
        write_rows(rows)
        print(f"{name}: {json.dumps(rows[name])} {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def _in_a_child(name: str, limit_s: float) -> dict[str, object]:
    """The row of a type, from a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, sender))
    child.start()
    sender.close()
    row: dict[str, object] = {}
    end = time.monotonic() + limit_s
    reason = f"it took more than {limit_s:.0f} s"
    while receiver.poll(max(0.0, end - time.monotonic())):
        try:
            row = receiver.recv()
        except EOFError:
            reason = ""
            break
        if "raised" in row:
            break
    child.kill()
    child.join()
    if "raised" in row:
        return {"load": row["raised"]} if not row.get("row") else {**row["row"], "raised": row["raised"]}  # type: ignore[dict-item]
    return row if not reason else {**(row or {"load": reason}), "raised": reason}


def _child(name: str, sender: Connection) -> None:
    last: dict[str, object] = {}

    def told(row: dict[str, object]) -> None:
        last.update(row)
        sender.send(row)

    try:
        survey(name, told)
    except Exception as error:  # the survey says what was raised, and goes on with the next type
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        sender.send({"raised": f"{place}: {type(error).__name__}: {error}"[:300], "row": last})
    sender.close()


if __name__ == "__main__":
    sys.exit(main())
