"""Reads and writes tables as text, with one line for each rank, in the format of torch.distributed.pipelining."""

import csv
import io
import re

from mpar.errors import ConfigError, brief
from mpar.schedules._action import Action, Actions
from mpar.schedules._lower import Transfer

__all__ = ["from_table", "to_table"]

_CELL = re.compile(r"(\d+)(SEND_F|RECV_F|WAIT_F|SEND_B|RECV_B|WAIT_B|F|B|I|W)(\d+)")
_OF_STAGE = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\((.+)\)OVERLAP_F_B")

Cell = tuple[int, str, int]


def from_table(text: str, *, drop: bool = False) -> tuple[tuple[Action | Transfer, ...], ...]:
    """Read a pipeline order from comma-separated text: a line per rank, `2F0` for the forward of microbatch 0 in stage 2.

    Cells may be empty. `(4F4;3B0)OVERLAP_F_B` becomes its two actions, in their order. SEND_F, RECV_F, SEND_B and RECV_B become
    transfers, numbered by kind, sending stage and microbatch. If the table has no WAIT, and torch writes none, a rank waits for a
    receive right before its consumer, and for a send at its end.
    drop: leave out UNSHARD, RESHARD and REDUCE_GRAD, which are otherwise refused: a program gathers and reduces parameters by
    rules of its own.
    Raises ConfigError, which lists all cells that cannot be read, or all messages whose other stage is on no rank.
    """
    rows: list[list[Cell]] = []
    wrong: list[str] = []
    for line, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        cells: list[Cell] = []
        for column, cell in enumerate(row, start=1):
            pair = _PAIR.fullmatch(cell.strip())
            for part in filter(None, map(str.strip, pair[1].split(";") if pair else [cell])):
                if match := _CELL.fullmatch(part):
                    cells.append((int(match[1]), match[2], int(match[3])))
                elif not _OF_STAGE.fullmatch(part):
                    wrong.append(f"line {line}, cell {column}: {brief(part)} is no action (2F0, 2B0, 2I0, 2W0, 2SEND_F0)")
                elif not drop:
                    work = "is no work on a microbatch (drop=True leaves it out)"
                    wrong.append(f"line {line}, cell {column}: {brief(part)} {work}")
        rows.append(cells)
    _refuse(wrong)
    return _with_transfers(rows)


def to_table(table: Actions | list[list[Action | Transfer]], *, waits: bool = True) -> str:
    """Write a pipeline order as `from_table` reads it. waits: False leaves out WAIT_F and WAIT_B, which torch does not read."""
    lines = [
        [str(cell) for cell in cells if waits or not (isinstance(cell, Transfer) and cell.op == "wait")] for cells in table
    ]
    return "".join(",".join(line) + "\n" for line in lines)


def _with_transfers(rows: list[list[Cell]]) -> tuple[tuple[Action | Transfer, ...], ...]:
    """The actions, and the transfers with their peers and numbers. The places of the forwards decide the peers."""
    place = {(stage, microbatch): rank for rank, cells in enumerate(rows) for stage, kind, microbatch in cells if kind == "F"}
    sends = {(kind[-1], stage, m) for cells in rows for stage, kind, m in cells if len(kind) > 1 and kind.startswith("SEND")}
    receives = {_source(stage, kind[-1], m) for cells in rows for stage, kind, m in cells if kind.startswith("RECV")}
    numbers = {message: number for number, message in enumerate(sorted(sends | receives, key=lambda m: (m[0] == "B", *m[1:])))}
    has_waits = any(kind.startswith("WAIT") for cells in rows for _, kind, _ in cells)
    wrong: list[str] = []
    table: list[tuple[Action | Transfer, ...]] = []
    for rank, cells in enumerate(rows):
        out: list[Action | Transfer] = []
        posted: dict[Cell, Transfer] = {}  # receives that no action has used yet
        last: list[Transfer] = []
        sent: set[Cell] = set()
        for stage, kind, m in cells:
            direction = kind[-1] if kind[-1] in "FW" else "B"
            key = (stage, direction, m)
            if len(kind) == 1:
                if not has_waits and key in posted:
                    out.append(posted.pop(key)._replace(op="wait"))
                out.append(Action(stage, kind, m))
                continue
            sending = kind.startswith("SEND") or key in sent  # before a stage sends, it has waited for what it received
            message = (direction, stage, m) if sending else _source(stage, direction, m)
            peer = place.get((stage + (1 if sending == (direction == "F") else -1), m))
            if peer is None or message not in numbers:
                wrong.append(
                    f"line {rank + 1}: {stage}{kind}{m} has no other end: no rank has the forward of that stage, or posts it"
                )
                continue
            transfer = Transfer(kind[:4].lower(), numbers[message], peer, stage, direction, m)
            out.append(transfer)
            if transfer.op == "send":
                sent.add(key)
                last.append(transfer._replace(op="wait"))
            elif transfer.op == "recv":
                posted[key] = transfer
        table.append((*out, *([] if has_waits else last)))
    _refuse(wrong)
    return tuple(table)


def _source(stage: int, kind: str, microbatch: int) -> tuple[str, int, int]:
    """The message that a stage receives, as (kind, stage that sends it, microbatch)."""
    return kind, stage - 1 if kind == "F" else stage + 1, microbatch


def _refuse(wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"cannot read a pipeline order: {'; '.join(wrong[:8])}{more}")
