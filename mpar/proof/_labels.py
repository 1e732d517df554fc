"""Labels: what the values of a program are.

Sums of gradients are terms, such as (d0 + d1) + d2, in which only the operands of one addition may change places: equal terms are
equal bits.
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
    "Moved",
    "OfSlice",
    "Result",
    "Squares",
    "Sum",
    "Terms",
    "What",
    "as_text",
    "before_reduction",
    "reduced",
]


@dataclass(frozen=True, slots=True)
class Given:
    """What is there before the first instruction, by its path, or by its key in the batch."""

    path: str


@dataclass(frozen=True, slots=True)
class OfSlice:
    """A batch entry that all microbatches share, of the slice number `slice` of each."""

    key: str
    slice: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result number `index` of an op of a segment; what gives losses only names them as results of its forward."""

    op: str
    segment: str
    index: int


@dataclass(frozen=True, slots=True)
class Contributed:
    """The gradient of the parameter at `path` that one use of it gives."""

    path: str
    use: str


@dataclass(frozen=True, slots=True)
class InputGradient:
    """The gradient of what a segment read besides parameters: its x, then what past slices carried over."""

    segment: str
    index: int


@dataclass(frozen=True, slots=True)
class Carried:
    """What a slice of a segment gives later ones to read."""

    segment: str
    index: int


@dataclass(frozen=True, slots=True, order=True)
class Squares:
    """Square sums of gradients of a unit, the first of which is the gradient number `first` of its part."""

    first: int
    index: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of two terms, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The same numbers elsewhere: op is "gather" or "reduce"."""

    op: str
    of: "What"


What = Given | OfSlice | Result | Contributed | InputGradient | Carried | Squares | Sum | Moved


class Label(NamedTuple):
    """What a value is, and the piece of the batch that it belongs to; None: to none, or to all."""

    what: What
    piece: Piece | None = None


def reduced(label: Label) -> Label:
    """The label of a gradient after its reduction."""
    return Label(Moved("reduce", label.what), label.piece)


def before_reduction(label: Label) -> Label:
    """A gradient before it was reduced."""
    what = label.what
    while isinstance(what, Moved) and what.op == "reduce":
        what = what.of
    return Label(what, label.piece)


def as_text(label: Label) -> str:
    """A label in words."""
    where = "" if label.piece is None else f" mb{label.piece.microbatch}" + (f".{label.piece.slice}" if label.piece.slice else "")
    return _words(label.what) + where


def _words(what: What) -> str:
    match what:
        case Given(path):
            return path
        case OfSlice(key, c):
            return f"{key} of slice {c}"
        case Result(op, segment, index):
            return " ".join(word for word in (op, segment, str(index)) if word)
        case Contributed(path, use):
            return f"the gradient of {path} by {use}"
        case InputGradient(segment, index):
            return f"the gradient of input {index} of {segment}"
        case Carried(segment, index):
            return f"what {segment} carries over, {index}"
        case Squares(first, index):
            return f"square sums {first}.{index}"
        case Sum():
            return "a sum"
        case Moved(op, of):
            return f"{op} of {_words(of)}"


class Terms:
    """Sums by their operands, and the operands of each sum."""

    def __init__(self) -> None:
        self._sums: dict[frozenset[Label], Label] = {}
        self._operands: dict[Sum, tuple[Label, Label]] = {}

    def __len__(self) -> int:
        return len(self._operands)

    def operands(self, total: Sum) -> tuple[Label, Label]:
        """What a sum adds."""
        return self._operands[total]

    def add(self, a: Label, b: Label) -> Label:
        """The term of a sum: a + b is b + a to the bit, (a + b) + c is not a + (b + c)."""
        key = frozenset((a, b))
        if key not in self._sums:
            total = Sum(len(self._sums))
            self._sums[key] = Label(total)
            self._operands[total] = (a, b)
        return self._sums[key]

    def fold(self, terms: Iterable[Label]) -> Label:
        """The sum of terms from left to right."""
        first, *others = terms
        for term in others:
            first = self.add(first, term)
        return first

    def within(self, label: Label) -> Iterator[Label]:
        """The terms of a sum, or the label itself."""
        todo = [label]
        while todo:
            term = todo.pop()
            if isinstance(term.what, Sum):
                todo.extend(self._operands[term.what])
            else:
                yield term
