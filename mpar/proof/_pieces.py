"""What is done for one piece of the batch after another: the same for each microbatch, and nothing that belongs to another."""

from collections.abc import Hashable, Sequence

from mpar.ir import Instruction, Piece
from mpar.proof._labels import Carried, Given, InputGradient, Label, OfSlice, Result, Sum, Terms, What, as_text

__all__ = ["Pieces"]


class Pieces:
    """Remembers what instructions read for the first microbatch, to compare those of the others with it.

    first:     what an op of a segment read for a slice of the first microbatch, without the microbatch's number.
    forwards:  what the forward of a segment's piece read.
    each:      what an op of a segment read of the slice itself, the same for every slice.
    readers:   of each value that a segment's piece carried over, the pieces that read it.
    """

    def __init__(self, terms: Terms, num_slices: int) -> None:
        self.terms, self.num_slices = terms, num_slices
        self.first: dict[tuple[str, str, int], tuple[Hashable, ...]] = {}
        self.forwards: dict[tuple[str, Piece], Sequence[Label]] = {}
        self.each: dict[tuple[str, str], list[What]] = {}
        self.readers: dict[tuple[str, Piece], dict[int, list[Piece]]] = {}

    def problem(self, instruction: Instruction, piece: Piece, found: Sequence[Label]) -> str | None:
        """What is wrong with the operands of an instruction: it reads the same for each microbatch, of slices each its own, a
        backward what its forward read."""
        why = self._foreign(instruction, piece, found)
        if why is None and self.num_slices > 1:
            why = self._slices_problem(instruction, piece, found)
        why = why or self._own_problem(instruction, piece, found)
        if why is not None:
            return why
        own = tuple(self._without_microbatch(label) for label in found)
        first = self.first.setdefault((instruction.op, instruction.segment, piece.slice), own)
        if first == own:
            return None
        at = next((i for i, (a, b) in enumerate(zip(first, own, strict=False)) if a != b), min(len(first), len(own)))
        what = as_text(found[at]) if at < len(found) else "nothing"
        return f"operand {at} is {what}, unlike that of the same segment for another microbatch"

    def _foreign(self, instruction: Instruction, piece: Piece, found: Sequence[Label]) -> str | None:
        """What an operand has of another microbatch, of a later slice, or of another slice that does not hand it on."""
        for label in found:
            for term in self.terms.within(label):
                of = term.piece
                if of is None or of == piece:
                    continue
                if of.microbatch != piece.microbatch:
                    return f"reads {as_text(term)}, which belongs to another microbatch"
                if of > piece and not isinstance(term.what, InputGradient):
                    return f"reads {as_text(term)}, which belongs to a later slice"
                if not _crosses_slices(term.what, instruction.segment):
                    return f"reads {as_text(term)}, which belongs to another slice"
        return None

    def _own_problem(self, instruction: Instruction, piece: Piece, found: Sequence[Label]) -> str | None:
        """What a forward reads of its own slice is the same for all slices. A backward reads it again, and in that order, besides
        what its own segment made and what the next one gave back."""
        segment = instruction.segment
        if instruction.op == "forward":
            self.forwards[segment, piece] = found
        if instruction.op == "forward" or (segment, piece) not in self.forwards:  # what is not run forward has one code for all
            own = [
                _without_slice(label.what, piece.slice)
                for label in found
                if label.piece in (None, piece) and not isinstance(label.what, Sum)
            ]
            if self.each.setdefault((instruction.op, segment), own) != own:
                return "does not read the same of its own slice as another slice of the same segment"
            return None
        again = [label for label in found if not _made_since_forward(label.what, segment)]
        following = iter(self.forwards[segment, piece])
        if all(label in following for label in again):
            return None
        return "does not read what its forward read, in that order"

    def _slices_problem(self, instruction: Instruction, piece: Piece, found: Sequence[Label]) -> str | None:
        """Past slices are read in order, and what a slice carried over has the gradients of all that read it when its backward is
        due."""
        segment = instruction.segment
        read = [
            (label.piece, label.what.index)
            for label in found
            if isinstance(label.what, Carried) and label.what.segment == segment and label.piece is not None
        ]
        past = [label.piece for label in found if _is_context(label.what) and label.piece not in (None, piece)]
        if read != sorted(set(read)) or past != sorted(p for p in past if p is not None):
            return "does not read what past slices carried over, and their context, in the order of the slices, each once"
        if instruction.op == "forward":
            for earlier, index in read:
                self.readers.setdefault((segment, earlier), {}).setdefault(index, []).append(piece)
            return None
        wanted = [sorted(readers) for readers in self.readers.get((segment, piece), {}).values()]
        terms = [
            [
                term.piece
                for term in self.terms.within(label)
                if isinstance(term.what, InputGradient) and term.what.segment == segment and term.piece is not None
            ]
            for label in found
        ]
        given = [sorted(pieces) for pieces in terms if pieces]
        if instruction.op == "backward_weight" or given == wanted:
            return None
        if instruction.op == "backward_input" and all(pieces in wanted for pieces in given):
            return None
        return "does not read the gradients of what it carried over, each made of those of all slices that read it"

    def _without_microbatch(self, label: Label) -> Hashable:
        """A label without the number of its microbatch."""
        if isinstance(label.what, Sum):
            return frozenset(self._without_microbatch(operand) for operand in self.terms.operands(label.what))
        return label.what, None if label.piece is None else label.piece.slice


def _crosses_slices(what: What, segment: str) -> bool:
    """Whether a segment may read it of another slice: what that carried over, the gradient of what this did, or keys' context."""
    carried = isinstance(what, (Carried, InputGradient)) and what.segment == segment
    return carried or isinstance(what, Given) or _is_context(what)


def _is_context(what: What) -> bool:
    return isinstance(what, Result) and what.op == "context"


def _without_slice(what: What, c: int) -> What:
    """A batch entry that all microbatches share, without the number of the slice, if that is `c`; anything else as it is."""
    return Given(what.key) if isinstance(what, OfSlice) and what.slice == c else what


def _made_since_forward(what: What, segment: str) -> bool:
    """Whether a backward may read it though its forward did not: results of its own segment, gradients, sums, the weight."""
    if isinstance(what, (Sum, InputGradient)):
        return True
    made = (("forward", segment), ("backward_input", segment), ("weight", ""))
    return isinstance(what, Result) and (what.op, what.segment) in made
