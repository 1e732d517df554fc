"""The end of a step: instructions for losses, metrics, the norm and updates read what they should, each once and in order."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mpar.errors import ProgramError
from mpar.ir import Instruction, ProgramData
from mpar.proof._labels import Given, Label, Meaning, Result, Squares, Terms, as_text

__all__ = ["NUM_SCALARS", "StepEnd"]

NUM_SCALARS = 4  # operands of an update behind the slots: lr, step, the clip factor and whether the update is skipped


class StepEnd:
    """Remembers what the instructions at the end of the step read, over all parts.

    losses, metrics: how often each label was read. squared: how often each gradient was read for the norm, by path.
    squares: per part, the labels of its sums of squares. order: the number of each segment in the chain. numbers: per part, the
    number of each gradient, by value. results: per part, the path of each new parameter and slot, by value.
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

    def weight_problem(self, operands: Sequence[Label]) -> str | None:
        """What is wrong if the operand is not the sum of the weights of all pieces; else None."""
        pieces = [Label(Result("weight", "", 0), piece) for piece in self.program.pieces]
        return None if operands == [self.terms.fold(pieces)] else "does not read the sum of the weights of all microbatches"

    def finish(self, operands: Sequence[Label]) -> tuple[str, str | None]:
        """The purpose of a `finish`, and what is wrong with its operands, or None.

        For the purpose "losses" it reads the losses of a part, in the order of microbatches and segments; for "finish", the
        vector of all losses and the reciprocal of the weight.
        """
        losses = [(label, label.meaning, label.piece) for label in operands]
        if all(isinstance(meaning, Result) and meaning.op == "forward" and piece is not None for _, meaning, piece in losses):
            results = [(piece, meaning) for _, meaning, piece in losses if isinstance(meaning, Result)]
            places = [(piece, self.order[result.segment], result.index) for piece, result in results]
            self.losses.update(operands)
            ordered = all(a < b for a, b in pairwise(places))  # type: ignore[operator]
            return "losses", None if ordered else "does not read losses in order of microbatches and segments, each once"
        right = operands == [Label(Result("losses", "", 0)), Label(Result("weight", "", 1))]
        why = "neither losses nor the vector of all and the weight"
        return "finish", None if right else f"reads {_all_as_text(operands)}, which are {why}"

    def report(self, operands: Sequence[Label]) -> tuple[str, str | None]:
        """The purpose of a `metrics`, and what is wrong with its operands, or None.

        For the purpose "all metrics" it reads the metrics of a part, each added over its microbatches; for "metrics", the vector
        of all metrics.
        """
        if operands == [Label(Result("all metrics", "", 0))]:
            return "metrics", None
        summands = [list(self.terms.within(label)) for label in operands]
        if not all(isinstance(term.meaning, Result) and term.meaning.op == "forward" for terms in summands for term in terms):
            return "all metrics", f"reads {_all_as_text(operands)}, which are neither metrics nor the vector of all"
        self.metrics.update(term for terms in summands for term in terms)
        mixed = any(len({term.meaning for term in terms}) > 1 for terms in summands)
        return "all metrics", "adds metrics of one segment to those of another" if mixed else None

    def leaving(self, operands: Sequence[Label]) -> tuple[str, str | None]:
        """The purpose of a `results`, and what is wrong with its operands, or None.

        For the purpose "no results" it reads nothing and makes zeros; for "results", it reads these or what the last segment
        returned, and gives it to all ranks.
        """
        if not operands:
            return "no results", None
        last = next(reversed(self.order))
        made = [[Label(Result("forward", last, i), self.program.pieces[0]) for i in range(len(operands))]]
        made.append([Label(Result("no results", "", i)) for i in range(len(operands))])
        why = f"reads {_all_as_text(operands)}, which are not all that segment {last} returned"
        return "results", None if list(operands) in made else why

    def norm(self, position: int, values: Sequence[int], operands: Sequence[Label]) -> tuple[str | Squares, str | None]:
        """The purpose of a `norm`, and what is wrong with its operands, or None.

        For the purpose `Squares` it reads the gradients of a unit; for "all squares", all sums of squares of a part, in order;
        for "norm", the vector of all sums of squares, and what decides whether the update is skipped: the loss and the limits.
        """
        numbers, paths = self.numbers[position], list(self.program.parts[position].gradients)
        if values and all(v in numbers for v in values):
            first = numbers[values[0]]
            self.squared.update(paths[numbers[v]] for v in values)
            right = [numbers[v] for v in values] == list(range(first, first + len(values)))
            return Squares(first, 0), None if right else "does not read gradients in order"
        if all(isinstance(label.meaning, Squares) for label in operands):
            right = list(operands) == sorted(self.squares[position], key=_place_of_squares)
            return "all squares", None if right else "does not read all sums of squares in order, each once"
        expected: list[Meaning] = [
            Result("all squares", "", 0),
            Result("finish", "", 0),
            Given("max_loss"),
            Given("max_grad_norm"),
        ]
        right = operands == [Label(meaning) for meaning in expected]
        why = "neither gradients nor the sums of all squares, the loss and the limits"
        return "norm", None if right else f"reads {_all_as_text(operands)}, which are {why}"

    def update_problem(self, position: int, instruction: Instruction, operands: Sequence[Label]) -> str | None:
        """What is wrong with the operands of an update, or None. It reads parameters, the gradients of those that are trained,
        slots, scalars, and a metric for each parameter that has no gradient, in this order. It makes new parameters and slots."""
        others = [label for label in operands if not (isinstance(label.meaning, Result) and label.meaning.op == "metrics")]
        results, gradients = self.results[position], self.program.parts[position].gradients
        made = [results.get(v, "") for v in instruction.outputs]
        num = sum(path.startswith("params.") for path in made)
        if num < 1 or not all(made):
            return "does not make new parameters and slots"
        paths, slots = [path.removeprefix("params.") for path in made[:num]], made[num:]
        trained = [path for path in paths if path in gradients]
        if len(operands) - len(others) != num - len(trained):
            return f"does not read a metric for each of {sorted(set(paths) - set(trained))}, which have no gradient"
        kept = [path for path in results.values() if path.startswith("opt.") and path.split(".", 2)[-1] in paths]
        if slots != kept:
            return f"makes slots that are not those of {paths}"
        scalars: list[Meaning] = [Given("lr"), Given("step"), Result("norm", "", 1), Result("norm", "", 2)]
        end = num + len(trained)  # of the gradients
        if [*others[:num], *others[end:]] != [*(Label(Given(path)) for path in made), *map(Label, scalars)]:
            return "does not read the parameters and slots whose new values it makes, and lr, step, scale and skip"
        if list(instruction.inputs[num:end]) != [gradients[path] for path in trained]:
            return "does not read the gradients of the parameters whose new values it makes"
        return None

    def check_once(self) -> None:
        """Raise ProgramError unless the losses of all pieces and all gradients were read once, and metrics at most once."""
        segments = {label.meaning for label in self.losses}
        if self.losses != Counter({Label(meaning, piece): 1 for meaning in segments for piece in self.program.pieces}):
            raise ProgramError("invalid program: the loss is not made of the losses of each microbatch, each once")
        if any(count != 1 for count in self.metrics.values()):
            raise ProgramError("invalid program: metrics of a microbatch are added more than once")
        paths = {path for part in self.program.parts for path in part.gradients}
        not_once = sorted(path for path in paths if self.squared[path] != 1)
        if not_once:
            raise ProgramError(f"invalid program: the norm does not read the gradients of {not_once} once each")


def _place_of_squares(label: Label) -> tuple[int, int]:
    assert isinstance(label.meaning, Squares)
    return label.meaning.first, label.meaning.index


def _all_as_text(operands: Sequence[Label]) -> str:
    return ", ".join(map(as_text, operands))
