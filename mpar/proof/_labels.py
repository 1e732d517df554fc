"""Labels: what the values of a program mean.

Sums of gradients are terms, such as (d0 + d1) + d2. Two terms are equal if they differ only in the order of the two operands of
an addition, so values with equal terms have equal bits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mpar.ir import Piece

__all__ = [
    "Carried",
    "Contributed",
    "Given",
    "InputGradient",
    "Label",
    "Meaning",
    "Moved",
    "OfSlice",
    "Result",
    "Squares",
    "Sum",
    "Terms",
    "as_text",
    "before_reduction",
    "reduced",
]


@dataclass(frozen=True, slots=True)
class Given:
    """A value that exists before the first instruction: the path of a leaf, or the key of an entry of the batch."""

    path: str


@dataclass(frozen=True, slots=True)
class OfSlice:
    """The part of a batch entry that slice number `slice` of every microbatch reads; the same for all microbatches."""

    key: str
    slice: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result number `index` of an op of a segment, or of a purpose at the end of a step, which has no segment. A loss is labelled
    as a result of the forward even if a backward makes it."""

    op: str
    segment: str
    index: int


@dataclass(frozen=True, slots=True)
class Contributed:
    """What one use of the parameter at `path` adds to its gradient."""

    path: str
    use: str


@dataclass(frozen=True, slots=True)
class InputGradient:
    """The gradient of input number `index` of a segment: its x, then what earlier slices carried."""

    segment: str
    index: int


@dataclass(frozen=True, slots=True)
class Carried:
    """What a segment carries from one slice to later ones."""

    segment: str
    index: int


@dataclass(frozen=True, slots=True, order=True)
class Squares:
    """Result number `index` of the norm that reads the gradients of a unit; the first of these is gradient number `first` of its
    part."""

    first: int
    index: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of two terms; `Terms` knows its operands by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A gathered parameter or a reduced gradient: op is "gather" or "reduce"."""

    op: str
    of: "Meaning"


Meaning = Given | OfSlice | Result | Contributed | InputGradient | Carried | Squares | Sum | Moved


class Label(NamedTuple):
    """What a value means, and the piece of the batch that it belongs to; None if it belongs to no single piece."""

    meaning: Meaning
    piece: Piece | None = None


def reduced(label: Label) -> Label:
    """The label of a gradient after its reduction."""
    return Label(Moved("reduce", label.meaning), label.piece)


def before_reduction(label: Label) -> Label:
    """The label of a gradient before its reduction."""
    meaning = label.meaning
    while isinstance(meaning, Moved) and meaning.op == "reduce":
        meaning = meaning.of
    return Label(meaning, label.piece)


def as_text(label: Label) -> str:
    """A label in words."""
    where = "" if label.piece is None else f" mb{label.piece.microbatch}" + (f".{label.piece.slice}" if label.piece.slice else "")
    return _words(label.meaning) + where


def _words(meaning: Meaning) -> str:
    match meaning:
        case Given(path):
            return path
        case OfSlice(key, slice_number):
            return f"{key} of slice {slice_number}"
        case Result(op, segment, index):
            return " ".join(word for word in (op, segment, str(index)) if word)
        case Contributed(path, use):
            return f"the gradient of {path} by {use}"
        case InputGradient(segment, index):
            return f"the gradient of input {index} of {segment}"
        case Carried(segment, index):
            return f"carried value {index} of {segment}"
        case Squares(first, index):
            return f"sums of squares {first}.{index}"
        case Sum():
            return "a sum"
        case Moved(op, of):
            return f"{op} of {_words(of)}"


class Terms:
    """All sums: each pair of operands has one sum, and each sum knows its operands."""

    def __init__(self) -> None:
        self._sums: dict[frozenset[Label], Label] = {}
        self._operands: dict[Sum, tuple[Label, Label]] = {}

    def __len__(self) -> int:
        return len(self._operands)

    def operands(self, total: Sum) -> tuple[Label, Label]:
        """What a sum adds."""
        return self._operands[total]

    def add(self, a: Label, b: Label) -> Label:
        """The term a + b. It is the same as b + a, which has the same bits; (a + b) + c and a + (b + c) differ."""
        key = frozenset((a, b))
        if key not in self._sums:
            total = Sum(len(self._sums))
            self._sums[key] = Label(total)
            self._operands[total] = (a, b)
        return self._sums[key]

    def fold(self, terms: Iterable[Label]) -> Label:
        """The term that adds `terms` from left to right."""
        total, *others = terms
        for term in others:
            total = self.add(total, term)
        return total

    def within(self, label: Label) -> Iterator[Label]:
        """Everything that a sum adds up, or the label itself if it is no sum."""
        todo = [label]
        while todo:
            term = todo.pop()
            if isinstance(term.meaning, Sum):
                todo.extend(self._operands[term.meaning])
            else:
                yield term
