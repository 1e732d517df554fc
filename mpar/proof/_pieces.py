"""Pieces: an instruction that is repeated for every piece reads the same values for each, and nothing that belongs to another."""

from collections import Counter
from collections.abc import Hashable, Sequence

from mpar.ir import Instruction, Piece
from mpar.proof._labels import Carried, Given, InputGradient, Label, Meaning, OfSlice, Result, Sum, Terms, as_text

__all__ = ["Pieces"]

COTANGENT = Result("weight", "", 1)
"""The reciprocal of the weight of the batch, made together with the weight."""


class Pieces:
    """Remembers what instructions read for the first microbatch, to compare those of the others with it.

    first:     by (op, segment, slice): what was read for the first microbatch, without the number of the microbatch.
    forwards:  by (segment, piece): what the forward read.
    primals:   by (segment, slice): what a forward read, alone or as one with its backward, without the number of the microbatch.
    own_slice: by (op, segment): what was read of the slice itself, which is the same for every slice.
    readers:   by (segment, piece), and then by the index of a value that it carried: the pieces that read this value.
    """

    def __init__(self, terms: Terms, num_slices: int) -> None:
        self.terms, self.num_slices = terms, num_slices
        self.first: dict[tuple[str, str, int], tuple[Hashable, ...]] = {}
        self.forwards: dict[tuple[str, Piece], Sequence[Label]] = {}
        self.primals: dict[tuple[str, int], list[Hashable]] = {}
        self.own_slice: dict[tuple[str, str], list[Meaning]] = {}
        self.readers: dict[tuple[str, Piece], dict[int, list[Piece]]] = {}

    def problem(self, instruction: Instruction, piece: Piece, operands: Sequence[Label]) -> str | None:
        """What is wrong with the operands of an instruction, or None. It must read the same for each microbatch; what it
        reads of its own slice must be the same for each slice; and a backward must read what its forward read."""
        why = self._foreign(instruction, piece, operands)
        if why is None and self.num_slices > 1:
            why = self._slices_problem(instruction, piece, operands)
        why = why or self._own_slice_problem(instruction, piece, operands) or self._primals_problem(instruction, piece, operands)
        if why is not None:
            return why
        current = tuple(self._without_microbatch(label) for label in operands)
        first = self.first.setdefault((instruction.op, instruction.segment, piece.slice), current)
        if first == current:
            return None
        pairs = enumerate(zip(first, current, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), min(len(first), len(current)))
        operand = as_text(operands[index]) if index < len(operands) else "missing"
        return f"operand {index} is {operand}, unlike that of the same segment for another microbatch"

    def _foreign(self, instruction: Instruction, piece: Piece, operands: Sequence[Label]) -> str | None:
        """What is wrong if an operand belongs to another microbatch, to a later slice without being a gradient from it, or to
        another slice that does not hand it over; else None."""
        for label in operands:
            for term in self.terms.within(label):
                term_piece = term.piece
                if term_piece is None or term_piece == piece:
                    continue
                if term_piece.microbatch != piece.microbatch:
                    return f"reads {as_text(term)}, which belongs to another microbatch"
                if term_piece > piece and not isinstance(term.meaning, InputGradient):
                    return f"reads {as_text(term)}, which belongs to a later slice"
                if not _crosses_slices(term.meaning, instruction.segment):
                    return f"reads {as_text(term)}, which belongs to another slice"
        return None

    def _own_slice_problem(self, instruction: Instruction, piece: Piece, operands: Sequence[Label]) -> str | None:
        """What is wrong with the operands that belong to the slice itself, or None.

        What a forward reads of its own slice is the same for every slice. A backward reads what its forward read, in the same
        order, and otherwise only what was made since then (`_made_since_forward`).
        """
        segment = instruction.segment
        if instruction.op == "forward":
            self.forwards[segment, piece] = operands
        if instruction.op == "forward" or (segment, piece) not in self.forwards:  # an op without a forward, such as context
            own_operands = [
                _without_slice(label.meaning, piece.slice)
                for label in operands
                if label.piece in (None, piece) and not isinstance(label.meaning, Sum)
            ]
            if self.own_slice.setdefault((instruction.op, segment), own_operands) != own_operands:
                return "does not read the same of its own slice as another slice of the same segment"
            return None
        read_again = [label for label in operands if not _made_since_forward(label.meaning, segment)]
        forward_operands = iter(self.forwards[segment, piece])
        if all(label in forward_operands for label in read_again):  # `in` advances the iterator, so this checks the order too
            return None
        return "does not read what its forward read, in that order"

    def _primals_problem(self, instruction: Instruction, piece: Piece, operands: Sequence[Label]) -> str | None:
        """What is wrong if a forward, alone or together with its backward, does not read what it reads for another microbatch, or
        if a backward does not read what was made since its forward in the order in which it was made, each once; else None."""
        segment = instruction.segment
        made = [label.meaning for label in operands if _made_since_forward(label.meaning, segment)]
        numbers = [(m.op == "backward_input", m.index) for m in made if isinstance(m, Result) and m.segment]
        if numbers != sorted(set(numbers)):
            return "does not read what its forward kept in the order in which it was made, each once"
        if instruction.op != "forward" and (instruction.op != "backward" or (segment, piece) in self.forwards):
            return None
        read = [self._without_microbatch(label) for label in operands if not _made_since_forward(label.meaning, segment)]
        if self.primals.setdefault((segment, piece.slice), read) != read:
            return "does not read what the forward of the same segment reads for another microbatch"
        return None

    def _slices_problem(self, instruction: Instruction, piece: Piece, operands: Sequence[Label]) -> str | None:
        """What is wrong with the operands that belong to other slices, or None.

        What earlier slices carried is read in the order of the slices. For each value that its slice carried and that has a
        gradient, a backward reads the sum of the gradients from all slices that read the value.
        """
        segment = instruction.segment
        read = [
            (label.piece, label.meaning.index)
            for label in operands
            if isinstance(label.meaning, Carried) and label.meaning.segment == segment and label.piece is not None
        ]
        past = [label.piece for label in operands if _is_context(label.meaning) and label.piece not in (None, piece)]
        if read != sorted(set(read)) or past != sorted(p for p in past if p is not None):
            return "does not read what earlier slices carried, and their context, in the order of the slices, each once"
        if instruction.op == "forward":
            for earlier, index in read:
                self.readers.setdefault((segment, earlier), {}).setdefault(index, []).append(piece)
            return None
        expected = [sorted(readers) for readers in self.readers.get((segment, piece), {}).values()]
        terms = [
            [
                term.piece
                for term in self.terms.within(label)
                if isinstance(term.meaning, InputGradient) and term.meaning.segment == segment and term.piece is not None
            ]
            for label in operands
        ]
        actual = [sorted(pieces) for pieces in terms if pieces]
        if instruction.op == "backward_weight" or not Counter(map(tuple, actual)) - Counter(map(tuple, expected)):
            return None
        return "does not read the gradients of what it carried, each the sum over all slices that read it"

    def _without_microbatch(self, label: Label) -> Hashable:
        """A label without the number of its microbatch."""
        if isinstance(label.meaning, Sum):
            return frozenset(self._without_microbatch(operand) for operand in self.terms.operands(label.meaning))
        return label.meaning, None if label.piece is None else label.piece.slice


def _crosses_slices(meaning: Meaning, segment: str) -> bool:
    """Whether a segment may read this from another slice: what that slice carried, a gradient of what this one carried, an entry
    of the batch, or the context of earlier keys."""
    carried = isinstance(meaning, (Carried, InputGradient)) and meaning.segment == segment
    return carried or isinstance(meaning, Given) or _is_context(meaning)


def _is_context(meaning: Meaning) -> bool:
    return isinstance(meaning, Result) and meaning.op == "context"


def _without_slice(meaning: Meaning, slice_number: int) -> Meaning:
    """`meaning`, without its slice number if it is an entry of slice `slice_number` that all microbatches share."""
    return Given(meaning.key) if isinstance(meaning, OfSlice) and meaning.slice == slice_number else meaning


def _made_since_forward(meaning: Meaning, segment: str) -> bool:
    """Whether a backward may read this although its forward did not: results of its own segment, gradients, sums, the weight."""
    if isinstance(meaning, (Sum, InputGradient)):
        return True
    made = (("forward", segment), ("backward_input", segment))
    return meaning == COTANGENT or (isinstance(meaning, Result) and (meaning.op, meaning.segment) in made)
