"""Meaning: what the values of a program are, so that every instruction can be seen to read what it should. Linear.

Each value that an instruction of the chain reads gets a label: which result of which segment and microbatch it is, or the path of
what it was at the start. Sums of gradients are terms, such as (d0 + d1) + d2, in which only the operands of one addition may
change places: equal terms are equal bits.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mpar.errors import ProgramError
from mpar.ir import Instruction, ProgramData

__all__ = ["NUM_SCALARS", "check_meaning", "describe", "fail"]

_MANY = ("weight", "context", "forward", "backward", "backward_input", "backward_weight")  # done for one microbatch after another
_BACKWARD = ("backward", "backward_input", "backward_weight")
NUM_SCALARS = 3  # of an update, its last operands: lr, step and the clip factor
Label = tuple[Any, int]
"""(what it is, piece); -1 where it belongs to none. Pieces are microbatches, or slices of their rows, numbered through."""


def check_meaning(program: ProgramData) -> None:
    """Raise ProgramError, naming rank and line, unless

    - what is done for several microbatches is done to the same things of each, and to nothing of another microbatch; of slices
      of its rows, forwards read nothing of later ones, and backwards what these have given back;
    - the weight of the batch is the sum of the weights of its microbatches, the loss is made of all losses;
    - each gradient is the sum of the contributions of every microbatch, each once, reduced as the strategy says. Microbatches are
      added in the order of the schedule, then uses of the parameter in the order of the chain;
    - the norm is made of each gradient once, and each parameter is updated with its own gradient and slots.

    The program's messages must be known to come to an end.
    """
    meaning = _Meaning(program)
    for position, line, step in _in_order(program):
        meaning.follow(position, line, step)
    meaning.check_whole()


def describe(step: Instruction) -> str:
    """An instruction in few words: `forward layers.3 mb0`."""
    return step.words + (f" message {step.message}" if step.message >= 0 else "")


def fail(program: ProgramData, position: int, line: int, step: Instruction, why: str) -> None:
    """Raise ProgramError about one line."""
    where = f"pp={position} " if len(program.parts) > 1 else ""
    raise ProgramError(f"invalid program: {where}line {line:04d}, {describe(step)}: {why}")


def _in_order(program: ProgramData) -> Iterator[tuple[int, int, Instruction]]:
    """All instructions, (position, line, instruction), so that messages are sent before they are waited for."""
    sent: set[int] = set()
    at = [0] * len(program.parts)
    moved = True
    while moved:
        moved = False
        for position, part in enumerate(program.parts):
            while at[position] < len(part.instructions):
                step = part.instructions[at[position]]
                if step.op == "send":
                    sent.add(step.message)
                elif step.op == "wait" and step.message not in sent:
                    break
                yield position, at[position], step
                at[position], moved = at[position] + 1, True


class _Meaning:
    """labels: by value. sums: numbers of terms, by their two operands; operands: the other way round."""

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.labels: dict[int, Label] = {}
        self.sums: dict[frozenset[Label], Label] = {}
        self.operands: dict[Label, tuple[Label, Label]] = {}
        self.sent: dict[int, int] = {}
        self.alike: dict[tuple[str, str, int], tuple[Hashable, ...]] = {}
        self.readers: dict[tuple[str, int], dict[int, list[int]]] = {}  # of each value that a segment's piece left: pieces
        self.read: dict[tuple[str, int], Sequence[Label]] = {}  # by the forward of a segment's piece
        self.own: dict[tuple[str, str], list[Any]] = {}  # by an op of a segment, of every slice itself
        self.losses: Counter[Label] = Counter()
        self.metrics: Counter[Label] = Counter()
        self.squared: Counter[str] = Counter()
        self.squares: list[list[Label]] = [[] for _ in program.parts]
        self.order = {name: index for index, name in enumerate(program.facts.stage_of)}
        self.paths = [list(part.gradients) for part in program.parts]
        self.finished = [{value: index for index, value in enumerate(part.gradients.values())} for part in program.parts]
        self.results = [{leaf.value: leaf.path for leaf in part.state_out} for part in program.parts]
        self.uses: dict[str, dict[str, int]] = {}  # of each parameter: use: position along pp
        for position, part in enumerate(program.parts):
            for path, use, _ in part.contributions.values():
                self.uses.setdefault(path, {})[use] = position
            for leaf in (*part.state_in, *part.scalars):
                self.labels[leaf.value] = (leaf.path, -1)
            for leaf in part.batch:
                key, _, piece = leaf.path.rpartition(".")
                shared = len(leaf.shape) == 1  # by all microbatches
                self.labels[leaf.value] = ((key, int(piece)), -1) if shared else (key, int(piece))

    def follow(self, position: int, line: int, step: Instruction) -> None:
        """Check what an instruction reads and label what it makes."""
        if step.op == "send":
            self.sent[step.message] = step.inputs[0]
        elif step.op == "wait":
            self.labels[step.inputs[0]] = self.labels[self.sent[step.message]]
        elif step.op == "accumulate":
            half = len(step.outputs)
            for a, b, out in zip(step.inputs[:half], step.inputs[half:], step.outputs, strict=True):
                self.labels[out] = self.add(self.labels[a], self.labels[b])
        elif step.op in ("offload", "fetch"):
            self.labels[step.outputs[0]] = self.labels[step.inputs[0]]
        elif step.op in ("gather", "reduce"):  # result by result
            for v, out in zip(step.inputs, step.outputs, strict=True):
                self.labels[out] = ((step.op, self.labels[v][0]), self.labels[v][1])
        elif step.op != "recv":
            why = self.check(position, step)
            if why is not None:
                fail(self.program, position, line, step, why)

    def check(self, position: int, step: Instruction) -> str | None:
        """What is wrong with the operands of an instruction that neither moves nor adds values; labels its results."""
        part = self.program.parts[position]
        found = [self.labels[v] for v in step.inputs]
        label: tuple = (step.op, step.segment)
        why = None
        piece = self.piece(step)
        if piece >= 0 and step.op in _MANY:
            why = self.check_alike(step, found)
        elif step.op == "weight":
            ones = [(("weight", "", 0), m) for m in range(self.program.num_pieces)]
            why = None if found == [self.fold(ones)] else "does not read the sum of the weights of all microbatches"
        elif step.op == "finish":
            label, why = self.check_finish(found)
        elif step.op == "metrics":
            label, why = self.check_metrics(found)
        elif step.op == "norm":
            label, why = self.check_norm(position, step.inputs, found)
        elif step.op == "update":
            why = self.check_update(position, step, found)
        skipped = 0
        for index, v in enumerate(step.outputs):
            given = part.contributions.get(v)
            if given is not None:
                path, use, m = given
                if (use.rstrip("'"), m) != (step.segment, piece) or step.op not in _BACKWARD:
                    why = f"makes a contribution that is said to be that of {use}, piece {m}"
                self.labels[v] = (("d", path, use), m)
                skipped += 1
            elif v in part.losses or v in part.left:
                what, maker = ("forward", "backward") if v in part.losses else ("left", "forward")
                segment, m, number = part.losses[v] if v in part.losses else part.left[v]
                if (segment, m, maker) != (step.segment, piece, step.op):
                    why = f"makes what is said to be made by the {maker} of {segment}, piece {m}"
                self.labels[v] = ((what, segment, number), m)
                skipped += 1
            elif (
                step.op in _BACKWARD
            ):  # both halves and the whole give the gradient of their input after losses and contributions
                self.labels[v] = (("dx", step.segment, index - skipped), piece)
            else:
                self.labels[v] = ((*label, index - skipped), piece)
        if step.op == "norm" and label[0] == "squares":
            self.squares[position] += [self.labels[v] for v in step.outputs]
        return why

    def piece(self, step: Instruction) -> int:
        """What an instruction works on; -1 for the whole batch."""
        return step.microbatch if step.microbatch < 0 else step.microbatch * self.program.num_slices + max(step.slice, 0)

    def check_alike(self, step: Instruction, found: Sequence[Label]) -> str | None:
        """The same slice of the same segment reads the same for each microbatch, of slices each its own, a backward what its
        forward read."""
        piece, num_slices = self.piece(step), self.program.num_slices
        for label in found:
            for what, m in self.terms_within(label):
                if m >= 0 and m // num_slices != step.microbatch:
                    return f"reads {_say((what, m))}, which belongs to another microbatch"
                if m > piece and not _is_dx(what):
                    return f"reads {_say((what, m))}, which belongs to a later slice"
                if m >= 0 and m != piece and not _crosses_slices(what, step.segment):
                    return f"reads {_say((what, m))}, which belongs to another slice"
        why = self.check_slices(step, found) if num_slices > 1 else None
        why = why or self.check_own(step, found)
        if why is not None:
            return why
        own = tuple(self.relative(label, step.microbatch * num_slices) for label in found)
        first = self.alike.setdefault((step.op, step.segment, piece % num_slices), own)
        if first == own:
            return None
        at = next((i for i, (a, b) in enumerate(zip(first, own, strict=False)) if a != b), min(len(first), len(own)))
        what = _say(found[at]) if at < len(found) else "nothing"
        return f"operand {at} is {what}, unlike that of the same segment for another microbatch"

    def check_own(self, step: Instruction, found: Sequence[Label]) -> str | None:
        """What a forward reads of its own slice is the same for all slices. A backward reads it again, and in that order, besides
        what its own segment made and what the next one gave back."""
        piece = self.piece(step)
        if step.op == "forward":
            self.read[step.segment, piece] = found
        if step.op == "forward" or (step.segment, piece) not in self.read:  # what is not run forward has one code for all slices
            c = piece % self.program.num_slices
            own = [_unnumbered(what, c) for what, m in found if m in (-1, piece) and not isinstance(what, int)]
            if self.own.setdefault((step.op, step.segment), own) != own:
                return "does not read the same of its own slice as another slice of the same segment"
            return None
        made = ("forward", step.segment), ("backward_input", step.segment), ("weight", "")
        again = [label for label in found if not isinstance(label[0], int) and label[0][:2] not in made and not _is_dx(label[0])]
        rest = iter(self.read[step.segment, piece])
        if all(label in rest for label in again):
            return None
        return "does not read what its forward read, in that order"

    def check_slices(self, step: Instruction, found: Sequence[Label]) -> str | None:
        """Past slices are read in order, and what a slice left has the gradients of all that read it when its backward is due."""
        piece = self.piece(step)
        left = [(m, what[2]) for what, m in found if isinstance(what, tuple) and what[:2] == ("left", step.segment)]
        past = [m for what, m in found if isinstance(what, tuple) and what[0] == "context" and m != piece]
        if left != sorted(set(left)) or past != sorted(past):
            return "does not read what past slices left, and their context, in the order of the slices, each once"
        if step.op == "forward":
            for m, number in left:
                self.readers.setdefault((step.segment, m), {}).setdefault(number, []).append(piece)
            return None
        wanted = [sorted(readers) for readers in self.readers.get((step.segment, piece), {}).values()]
        terms = [[m for what, m in self.terms_within(label) if _is_dx(what) and what[1] == step.segment] for label in found]
        given = [sorted(own) for own in terms if own]
        if step.op == "backward_weight" or given == wanted or (step.op == "backward_input" and all(g in wanted for g in given)):
            return None
        return "does not read the gradients of what it left, each made of those of all slices that read it"

    def terms_within(self, label: Label) -> Iterator[Label]:
        """The terms of a sum, or the label itself."""
        left = [label]
        while left:
            what, m = left.pop()
            if isinstance(what, int):
                left.extend(self.operands[what, m])
            else:
                yield what, m

    def relative(self, label: Label, first: int) -> Hashable:
        """A label without the number of its microbatch, whose first piece is `first`."""
        what, m = label
        if isinstance(what, int):
            return frozenset(self.relative(operand, first) for operand in self.operands[label])
        return what, m - first if m >= 0 else None

    def check_finish(self, found: Sequence[Label]) -> tuple[tuple, str | None]:
        """The losses of a part in order of microbatch and segment, then the vector of all losses and the reciprocal weight."""
        if all(isinstance(what, tuple) and what[0] == "forward" for what, _ in found):
            places = [(m, self.order[segment], index) for (_, segment, index), m in found]
            self.losses.update(found)
            ordered = all(a < b for a, b in pairwise(places))
            return ("losses",), None if ordered else "does not read losses in order of microbatches and segments, each once"
        good = found == [(("losses", 0), -1), (("weight", "", 1), -1)]
        return ("finish",), None if good else f"reads {', '.join(map(_say, found))}, not losses, nor their vector and the weight"

    def check_metrics(self, found: Sequence[Label]) -> tuple[tuple, str | None]:
        """The metrics of a part, each added over its microbatches; or the vector of all."""
        if found == [(("all metrics", 0), -1)]:
            return ("metrics",), None
        terms = [term for label in found for term in self.terms(label)]
        if not all(isinstance(what, tuple) and what[0] == "forward" for what, _ in terms):
            return ("all metrics",), f"reads {', '.join(map(_say, found))}, not metrics nor their vector"
        self.metrics.update(terms)
        mixed = any(len({what for what, _ in self.terms(label)}) > 1 for label in found)
        return ("all metrics",), "adds metrics of one segment to those of another" if mixed else None

    def terms(self, label: Label) -> list[Label]:
        """What a sum is made of, from left to right."""
        if label not in self.operands:
            return [label]
        return [term for part in self.operands[label] for term in self.terms(part)]

    def check_norm(self, position: int, values: Sequence[int], found: Sequence[Label]) -> tuple[tuple, str | None]:
        """Gradients of a unit; or all square sums of a part, in order; or the vector of all."""
        finished = self.finished[position]
        if values and all(v in finished for v in values):
            first = finished[values[0]]
            self.squared.update(self.paths[position][finished[v]] for v in values)
            good = [finished[v] for v in values] == list(range(first, first + len(values)))
            return ("squares", first), None if good else "does not read gradients in order"
        if all(isinstance(what, tuple) and what[0] == "squares" for what, _ in found):
            good = list(found) == sorted(self.squares[position])
            return ("all squares",), None if good else "does not read all square sums in order, each once"
        return ("norm",), None if found == [(("all squares", 0), -1)] else f"reads {', '.join(map(_say, found))}, not gradients"

    def add(self, a: Label, b: Label) -> Label:
        """The term of a sum: a + b is b + a to the bit, (a + b) + c is not a + (b + c)."""
        key = frozenset((a, b))
        if key not in self.sums:
            self.sums[key] = (len(self.sums), -1)
            self.operands[self.sums[key]] = (a, b)
        return self.sums[key]

    def fold(self, terms: Iterable[Label]) -> Label:
        """The sum of terms from left to right."""
        first, *rest = terms
        for term in rest:
            first = self.add(first, term)
        return first

    def check_update(self, position: int, step: Instruction, found: Sequence[Label]) -> str | None:
        """Operands are parameters, their gradients, slots, scalars, then metrics; results are parameters and slots."""
        found = [label for label in found if not (isinstance(label[0], tuple) and label[0][0] == "metrics")]
        results, gradients = self.results[position], self.program.parts[position].gradients
        new = [results.get(v, "") for v in step.outputs]
        num = len(found) - NUM_SCALARS - len(new)
        if num < 1 or not all(new):
            return "does not make new parameters and slots"
        paths, slots = [path.removeprefix("params.") for path in new[:num]], new[num:]
        if [path.split(".", 2)[-1] for path in slots] != paths * (len(slots) // num):
            return f"makes slots that do not belong to {paths}"
        scalars = [("lr", -1), ("step", -1), (("norm", 1), -1)]
        if [*found[:num], *found[2 * num :]] != [*((path, -1) for path in new), *scalars]:
            return "does not read the parameters and slots that it makes anew, and lr, step and scale"
        if list(step.inputs[num : 2 * num]) != [gradients[path] for path in paths]:
            return "does not read the gradients of the parameters that it makes anew"
        return None

    def check_whole(self) -> None:
        """What no single instruction shows."""
        program = self.program
        segments = {what for what, _ in self.losses}
        if self.losses != Counter({(what, m): 1 for what in segments for m in range(program.num_pieces)}):
            raise ProgramError("invalid program: the loss is not made of the losses of each microbatch, each once")
        if any(count != 1 for count in self.metrics.values()):
            raise ProgramError("invalid program: metrics of a microbatch are added more than once")
        uneven = sorted(path for path in {path for own in self.paths for path in own} if self.squared[path] != 1)
        if uneven:
            raise ProgramError(f"invalid program: the norm does not read the gradients of {uneven} once each")
        expected = self.expected()
        for position, part in enumerate(program.parts):
            for path, value in part.gradients.items():
                found = self.labels[value]
                if found != expected[path]:
                    segments = {use.rstrip("'") for use in self.uses[path]}
                    _refuse_unless_whole(path, self.items(path, found), segments, program.num_pieces)
                    where = f"pp={position} " if len(program.parts) > 1 else ""
                    why = "is not added in the order of the schedule, or not reduced once"
                    raise ProgramError(f"invalid program: {where}the gradient of {path} {why}")

    def expected(self) -> dict[str, Label]:
        """The term that each gradient should be, by path."""
        program, each = self.program, self.program.facts.reduce == "each"
        orders: dict[tuple[int, int], list[int]] = {}
        for position, own in enumerate(program.schedule):
            for action in own:
                if action.kind in "BW":
                    orders.setdefault((position, action.stage), []).append(action.microbatch)
        out = {}
        for path, uses in self.uses.items():
            sums, items = [], Counter[tuple[str, int]]()
            for use in sorted(uses, key=lambda use: (self.order[use.rstrip("'")], len(use))):
                segment = use.rstrip("'")
                order = orders.get((uses[use], program.facts.stage_of[segment]), [])
                slices = [range((m + 1) * program.num_slices - 1, m * program.num_slices - 1, -1) for m in order]  # last first
                items.update((segment, piece) for pieces in slices for piece in pieces)
                terms: list[list[Label]] = [[(("d", path, use), piece) for piece in pieces] for pieces in slices]
                if terms and each:
                    sums.append(self.fold(_reduced(self.fold(own)) for own in terms))
                elif terms:
                    sums.append(_reduced(self.fold(label for own in terms for label in own)))
            _refuse_unless_whole(path, items, {use.rstrip("'") for use in uses}, program.num_pieces)
            out[path] = self.fold(sums)
        return out

    def items(self, path: str, label: Label) -> Counter[tuple[str, int]]:
        """What a term adds up, for a message: (segment, microbatch) of contributions to `path`, else words."""
        counts, items = Counter({_inside(label): 1}), Counter[tuple[str, int]]()
        for number in reversed(range(len(self.sums))):
            count = counts.pop((number, -1), 0)
            for operand in self.operands[number, -1] if count else ():
                counts[_inside(operand)] += count
        for (what, m), count in counts.items():
            own = isinstance(what, tuple) and what[:2] == ("d", path)
            items[(what[2].rstrip("'") if own else _say((what, m))), m] += count
        return items


def _crosses_slices(what: Any, segment: str) -> bool:
    """Whether a segment may read it of another slice: what that left, gradients of what this one left, context of keys."""
    return isinstance(what, str) or what[0] == "context" or (what[0] in ("left", "dx") and what[1] == segment)


def _unnumbered(what: Any, c: int) -> Any:
    """A batch entry that all microbatches share, without the number of the slice, if that is `c`; anything else as it is."""
    return what[0] if isinstance(what, tuple) and what[1:] == (c,) else what


def _is_dx(what: Any) -> bool:
    return isinstance(what, tuple) and what[0] == "dx"


def _reduced(label: Label) -> Label:
    return ("reduce", label[0]), label[1]


def _inside(label: Label) -> Label:
    """A term before it was reduced."""
    what, m = label
    while isinstance(what, tuple) and what[0] == "reduce":
        what = what[1]
    return what, m


def _say(label: Label) -> str:
    """A label in words."""
    what, m = label
    words = " ".join(str(word) for word in what) if isinstance(what, tuple) else "a sum" if isinstance(what, int) else str(what)
    return words + (f" mb{m}" if m >= 0 else "")


def _refuse_unless_whole(path: str, items: Counter[tuple[str, int]], segments: set[str], num_pieces: int) -> None:
    """Every piece of every segment that reads a parameter adds to its gradient once."""
    whole = Counter({(segment, m): 1 for segment in segments for m in range(num_pieces)})
    if items != whole:
        missing, extra = sorted((whole - items).elements()), sorted((items - whole).elements())
        raise ProgramError(
            f"invalid program: the gradient of {path} lacks the contributions {missing} (use, microbatch)"
            f" and has {extra} too often"
        )
