"""Tables as text, one line per rank, as torch.distributed.pipelining writes and reads them."""

import csv
import io
import re

from mpar.errors import ConfigError
from mpar.schedules._action import Action, Actions

__all__ = ["from_table", "to_table"]

_CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_OF_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def from_table(text: str, *, drop: bool = False) -> tuple[tuple[Action, ...], ...]:
    """Read a pipeline order from comma-separated text: a line per rank, `2F0` for the forward of microbatch 0 in stage 2.

    Cells may be empty. `(4F4;3B0)OVERLAP_F_B` becomes its members in their order. drop: leave out what torch's lowering adds
    (messages; gathers, frees and reductions of parameters), which is refused otherwise: lower() finds its own.
    Raises ConfigError with every cell that cannot be read.
    """
    table, wrong = [], []
    for line, row in enumerate(csv.reader(io.StringIO(text))):
        own: list[Action] = []
        for column, cell in enumerate(row):
            pair = _PAIR.fullmatch(cell.strip())
            for part in pair[1].split(";") if pair else [cell]:
                match = _CELL.fullmatch(part.strip())
                kind = match[2] if match else ""
                if match and kind in ("F", "B", "I", "W") and match[3]:
                    own.append(Action(int(match[1]), kind, int(match[3])))
                elif match and (kind in _OF_STAGE or (len(kind) > 1 and match[3])) and not pair:
                    if not drop:
                        wrong.append(
                            f"line {line + 1}, cell {column + 1}: {cell.strip()!r} is no computation (drop=True leaves it out)"
                        )
                elif part.strip() or pair:
                    wrong.append(f"line {line + 1}, cell {column + 1}: {cell.strip()!r} is no action (2F0, 2B0, 2I0, 2W0)")
        table.append(tuple(own))
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"cannot read a pipeline order: {'; '.join(wrong[:8])}{more}")
    return tuple(table)


def to_table(table: Actions) -> str:
    """Write a pipeline order as `from_table` and torch read it."""
    return "".join(",".join(map(str, own)) + "\n" for own in table)
