"""The end of a step: losses, metrics, the norm and the update read what they should, each once and in order."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mpar.errors import ProgramError
from mpar.ir import Instruction, ProgramData
from mpar.proof._labels import Given, Label, Result, Squares, Terms, What, as_text

__all__ = ["NUM_SCALARS", "StepEnd"]

NUM_SCALARS = 3  # of an update, its last operands: lr, step and the clip factor


class StepEnd:
    """Remembers what the ends of all parts read.

    losses, metrics: labels, counted. squared: paths of gradients, counted. squares: per part, the labels of its square sums.
    """

    def __init__(self, program: ProgramData, terms: Terms) -> None:
        self.program, self.terms = program, terms
        self.losses: Counter[Label] = Counter()
        self.metrics: Counter[Label] = Counter()
        self.squared: Counter[str] = Counter()
        self.squares: list[list[Label]] = [[] for _ in program.parts]
        self.order = {name: index for index, name in enumerate(program.facts.stage_of)}
        self.numbers = [{value: index for index, value in enumerate(part.gradients.values())} for part in program.parts]
        self.results = [{leaf.value: leaf.path for leaf in part.state_out} for part in program.parts]

    def weight_problem(self, found: Sequence[Label]) -> str | None:
        """The total weight is the sum of the weights of all pieces."""
        pieces = [Label(Result("weight", "", 0), piece) for piece in self.program.pieces]
        return None if found == [self.terms.fold(pieces)] else "does not read the sum of the weights of all microbatches"

    def finish(self, found: Sequence[Label]) -> tuple[str, str | None]:
        """The losses of a part in order of microbatch and segment; or the vector of all losses and the reciprocal weight.

        Returns what the instruction is for, and what is wrong with its operands.
        """
        losses = [(label, label.what, label.piece) for label in found]
        if all(isinstance(what, Result) and what.op == "forward" and piece is not None for _, what, piece in losses):
            places = [(piece, self.order[what.segment], what.index) for _, what, piece in losses if isinstance(what, Result)]
            self.losses.update(found)
            ordered = all(a < b for a, b in pairwise(places))  # type: ignore[operator]
            return "losses", None if ordered else "does not read losses in order of microbatches and segments, each once"
        good = found == [Label(Result("losses", "", 0)), Label(Result("weight", "", 1))]
        return "finish", None if good else f"reads {_all_as_text(found)}, not losses, nor their vector and the weight"

    def report(self, found: Sequence[Label]) -> tuple[str, str | None]:
        """The metrics of a part, each added over its microbatches; or the vector of all."""
        if found == [Label(Result("all metrics", "", 0))]:
            return "metrics", None
        terms = [list(self.terms.within(label)) for label in found]
        if not all(isinstance(term.what, Result) and term.what.op == "forward" for of_label in terms for term in of_label):
            return "all metrics", f"reads {_all_as_text(found)}, not metrics nor their vector"
        self.metrics.update(term for of_label in terms for term in of_label)
        mixed = any(len({term.what for term in of_label}) > 1 for of_label in terms)
        return "all metrics", "adds metrics of one segment to those of another" if mixed else None

    def norm(self, position: int, values: Sequence[int], found: Sequence[Label]) -> tuple[str | Squares, str | None]:
        """Gradients of a unit; or all square sums of a part, in order; or the vector of all."""
        numbers, paths = self.numbers[position], list(self.program.parts[position].gradients)
        if values and all(v in numbers for v in values):
            first = numbers[values[0]]
            self.squared.update(paths[numbers[v]] for v in values)
            good = [numbers[v] for v in values] == list(range(first, first + len(values)))
            return Squares(first, 0), None if good else "does not read gradients in order"
        if all(isinstance(label.what, Squares) for label in found):
            good = list(found) == sorted(self.squares[position], key=_place_of_squares)
            return "all squares", None if good else "does not read all square sums in order, each once"
        good = found == [Label(Result("all squares", "", 0))]
        return "norm", None if good else f"reads {_all_as_text(found)}, not gradients"

    def update_problem(self, position: int, instruction: Instruction, found: Sequence[Label]) -> str | None:
        """Operands are parameters, their gradients, slots, scalars, then metrics; results are parameters and slots."""
        found = [label for label in found if not (isinstance(label.what, Result) and label.what.op == "metrics")]
        results, gradients = self.results[position], self.program.parts[position].gradients
        new = [results.get(v, "") for v in instruction.outputs]
        num = len(found) - NUM_SCALARS - len(new)
        if num < 1 or not all(new):
            return "does not make new parameters and slots"
        paths, slots = [path.removeprefix("params.") for path in new[:num]], new[num:]
        if [path.split(".", 2)[-1] for path in slots] != paths * (len(slots) // num):
            return f"makes slots that do not belong to {paths}"
        scalars: list[What] = [Given("lr"), Given("step"), Result("norm", "", 1)]
        if [*found[:num], *found[2 * num :]] != [*(Label(Given(path)) for path in new), *map(Label, scalars)]:
            return "does not read the parameters and slots that it makes anew, and lr, step and scale"
        if list(instruction.inputs[num : 2 * num]) != [gradients[path] for path in paths]:
            return "does not read the gradients of the parameters that it makes anew"
        return None

    def check_once(self) -> None:
        """Raise ProgramError unless all losses of all pieces, and all gradients, were read once, and metrics at most once."""
        segments = {label.what for label in self.losses}
        if self.losses != Counter({Label(what, piece): 1 for what in segments for piece in self.program.pieces}):
            raise ProgramError("invalid program: the loss is not made of the losses of each microbatch, each once")
        if any(count != 1 for count in self.metrics.values()):
            raise ProgramError("invalid program: metrics of a microbatch are added more than once")
        paths = {path for part in self.program.parts for path in part.gradients}
        uneven = sorted(path for path in paths if self.squared[path] != 1)
        if uneven:
            raise ProgramError(f"invalid program: the norm does not read the gradients of {uneven} once each")


def _place_of_squares(label: Label) -> tuple[int, int]:
    assert isinstance(label.what, Squares)
    return label.what.first, label.what.index


def _all_as_text(found: Sequence[Label]) -> str:
    return ", ".join(map(as_text, found))
