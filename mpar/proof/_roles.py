"""Roles: what each operand of a backward is to its segment. It is the same for every instruction that runs the same kind.

Instructions of other microbatches are not enough to compare with: a schedule may run the backward of a segment as a whole for one
microbatch and in halves for all others. Layers that are alike run one kind.
"""

from collections.abc import Hashable, Mapping, Sequence

from mpar.ir import Instruction, Piece
from mpar.proof._labels import Label, Result, as_text

__all__ = ["BACKWARD", "Roles"]

BACKWARD = ("backward", "backward_input", "backward_weight")


class Roles:
    """of_kind: by kind, the roles of what its first instruction read."""

    def __init__(self) -> None:
        self.of_kind: dict[str, list[Hashable]] = {}

    def problem(
        self, instruction: Instruction, labels: Mapping[int, Label], forwards: Mapping[tuple[str, Piece], Sequence[Label]]
    ) -> str | None:
        """What is wrong if an operand has another role than for the first instruction of this kind, or None.

        forwards: by segment and piece, what the forward read.
        """
        members = [member for member in instruction.alone if member.op in BACKWARD]
        read = [(labels[v], member) for member in members for v in member.inputs]
        roles = [_role(label, member, forwards) for label, member in read]
        first = self.of_kind.setdefault(instruction.kind, roles)
        wrong = next((label for (label, _), a, b in zip(read, first, roles, strict=True) if a != b), None)
        return None if wrong is None else f"reads {as_text(wrong)}, unlike the first instruction of its kind"


def _role(label: Label, member: Instruction, forwards: Mapping[tuple[str, Piece], Sequence[Label]]) -> Hashable:
    """The number of a result of the segment's forward or of the first half of its backward; of what its forward read, the place;
    of all else only its sort, such as a gradient."""
    meaning = label.meaning
    if isinstance(meaning, Result) and meaning.segment == member.segment:
        return meaning.op, meaning.index
    assert member.piece is not None
    read = list(forwards.get((member.segment, member.piece), ()))
    return read.index(label) if label in read else type(meaning).__name__
