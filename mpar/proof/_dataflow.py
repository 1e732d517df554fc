"""Dataflow: every instruction reads what it should.

Every value gets a label that says what it means, computed from the labels of what its instruction reads. This takes time
linear in the number of instructions.
"""

from collections.abc import Iterator, Sequence

from mpar.errors import ProgramError
from mpar.ir import Instruction, Part, Piece, ProgramData
from mpar.proof._fail import fail
from mpar.proof._gradients import check_gradients
from mpar.proof._labels import (
    Carried,
    Contributed,
    Given,
    InputGradient,
    Label,
    Meaning,
    Moved,
    OfSlice,
    Result,
    Squares,
    Terms,
    as_text,
)
from mpar.proof._pieces import Pieces
from mpar.proof._roles import BACKWARD, Roles
from mpar.proof._states import States
from mpar.proof._step_end import StepEnd

__all__ = ["check_dataflow", "in_order"]

_PER_PIECE = ("weight", "context", "forward", "backward", "backward_input", "backward_weight")  # ops done for every piece


def check_dataflow(program: ProgramData) -> None:
    """Raise ProgramError, naming position and line, unless

    - an instruction that is repeated for every microbatch reads the same values for each, and nothing of another microbatch. If
      rows are cut into slices, a forward reads nothing of later slices, and a backward reads the gradients that later slices give
      for what its slice carried; every backward of one kind reads the same results of its forward;
    - the weight of the batch is the sum of the weights of its microbatches, and the loss contains the losses of all of them;
    - each gradient is the sum of the contributions of all microbatches, each once, reduced as the strategy says. For each use of
      the parameter, microbatches are added in the order of the schedule; then these sums, in the order of the chain;
    - the norm contains each gradient once, and each parameter is updated with its own gradient and slots;
    - every gradient of an input that a backward gives is read, or sent and read there;
    - the state of a segment is replaced once, by the segment's forward, in the memory in which it lies.

    Only for programs that `mpar.schedules.check_order` has accepted, so that no message is waited for without end.
    """
    flow, roles = _Flow(program), Roles()
    for position, line, instruction in in_order(program):
        problems = (why for member in instruction.alone if (why := flow.follow(position, member)) is not None)
        why = next(problems, _members_problem(instruction)) or roles.problem(instruction, flow.labels, flow.pieces.forwards)
        if why is not None:
            fail(program, position, line, instruction, why)
    flow.check_read()
    flow.end.check_once()
    flow.states.check_all()
    check_gradients(program, flow.terms, flow.labels)


def in_order(program: ProgramData) -> Iterator[tuple[int, int, Instruction]]:
    """All instructions as (position, line, instruction), in an order in which every message is sent before it is waited for."""
    sent: set[int] = set()
    next_line = [0] * len(program.parts)
    progress = True
    while progress:
        progress = False
        for position, part in enumerate(program.parts):
            while next_line[position] < len(part.instructions):
                instruction = part.instructions[next_line[position]]
                if instruction.op == "send":
                    sent.add(instruction.message)
                elif instruction.op == "wait" and instruction.message not in sent:
                    break
                yield position, next_line[position], instruction
                next_line[position], progress = next_line[position] + 1, True


def _members_problem(instruction: Instruction) -> str | None:
    """What is wrong if an instruction does not read and make what its members do, in their order; else None."""
    if not instruction.members:
        return None
    read: dict[int, None] = {}
    made: list[int] = []
    for member in instruction.members:
        read.update(dict.fromkeys(v for v in member.inputs if v not in made))
        made += member.outputs
    if (instruction.inputs, instruction.outputs) != (tuple(read), tuple(made)):
        return "does not read and make what its members do"
    return None


class _Flow:
    """The labels of all values that were made so far.

    labels: the label of each value. sent: the value that each message carries. unread: gradients of inputs that nothing has read.
    """

    def __init__(self, program: ProgramData) -> None:
        self.program, self.terms = program, Terms()
        self.pieces, self.end = Pieces(self.terms, program.num_slices), StepEnd(program, self.terms)
        self.states = States(program)
        self.sent: dict[int, int] = {}
        self.labels: dict[int, Label] = {}
        self.unread: set[int] = set()
        for part in program.parts:
            self._label_boundary(part)

    def _label_boundary(self, part: Part) -> None:
        """Label the values that exist before the first instruction."""
        for leaf in (*part.state_in, *part.scalars):
            self.labels[leaf.value] = Label(Given(leaf.path))
        for leaf in part.batch:
            key, _, number = leaf.path.rpartition(".")
            piece = self.program.pieces[int(number)]
            shared = len(leaf.shape) == 1  # an entry with one dim is the same for all microbatches
            self.labels[leaf.value] = Label(OfSlice(key, piece.slice)) if shared else Label(Given(key), piece)

    def check_read(self) -> None:
        """Raise ProgramError unless every gradient of an input was read."""
        if self.unread:
            dropped = sorted({as_text(self.labels[v]) for v in self.unread})
            raise ProgramError(f"invalid program: nothing reads {', '.join(dropped[:4])}")

    def follow(self, position: int, instruction: Instruction) -> str | None:
        """Label what an instruction makes. Returns what is wrong with its operands, or None."""
        labels = self.labels
        if instruction.op != "wait":
            self.unread.difference_update(instruction.inputs)
        match instruction.op:
            case "send":
                self.sent[instruction.message] = instruction.inputs[0]
            case "wait":
                value, sent = instruction.inputs[0], self.sent[instruction.message]
                labels[value] = labels[sent]
                if value != sent and isinstance(labels[sent].meaning, InputGradient):
                    self.unread.add(value)
            case "accumulate":
                half = len(instruction.outputs)
                for a, b, out in zip(instruction.inputs[:half], instruction.inputs[half:], instruction.outputs, strict=True):
                    labels[out] = self.terms.add(labels[a], labels[b])
            case "offload" | "fetch":
                labels[instruction.outputs[0]] = labels[instruction.inputs[0]]
            case "gather" | "reduce":  # each result comes from the operand with its index
                for v, out in zip(instruction.inputs, instruction.outputs, strict=True):
                    labels[out] = Label(Moved(instruction.op, labels[v].meaning), labels[v].piece)
            case "recv":  # `wait` labels what it receives
                pass
            case _:
                return self._compute(position, instruction)
        return None

    def _compute(self, position: int, instruction: Instruction) -> str | None:
        """`follow` for an instruction that neither moves nor adds values."""
        operands = [self.labels[v] for v in instruction.inputs]
        purpose, why = self._purpose(position, instruction, operands)
        why = why or self.states.problem(position, instruction)
        why = self._label_results(position, instruction, purpose) or why
        if instruction.op == "norm" and isinstance(purpose, Squares):
            self.end.squares[position] += [self.labels[v] for v in instruction.outputs]
        return why

    def _purpose(self, position: int, instruction: Instruction, operands: Sequence[Label]) -> tuple[str | Squares, str | None]:
        """The purpose of an instruction, and what is wrong with its operands, or None. The purpose is the op, except at the end
        of a step, where one op has several purposes: that of a norm of gradients is what its first result means."""
        piece, op = instruction.piece, instruction.op
        if piece is not None and op in _PER_PIECE:
            return op, self.pieces.problem(instruction, piece, operands)
        match op:
            case "weight":
                return op, self.end.weight_problem(operands)
            case "finish":
                return self.end.finish(operands)
            case "metrics":
                return self.end.report(operands)
            case "results":
                return self.end.leaving(operands)
            case "norm":
                return self.end.norm(position, instruction.inputs, operands)
            case "update":
                return op, self.end.update_problem(position, instruction, operands)
        return op, None

    def _label_results(self, position: int, instruction: Instruction, purpose: str | Squares) -> str | None:
        """Label what an instruction makes. Returns what is wrong if the part lists it for another instruction, else None."""
        part, piece, why = self.program.parts[position], instruction.piece, None
        num_listed = 0  # values that the part lists, such as contributions and reports: other results are numbered without them
        for index, v in enumerate(instruction.outputs):
            label, makers, segment = _listed_label(part, v)
            if label is not None:
                if (segment, label.piece) != (instruction.segment, piece) or instruction.op not in makers:
                    why = f"makes {_listed_in_words(part, v)}"
                self.labels[v] = label
                num_listed += 1
            else:
                self.labels[v] = Label(self._result(instruction, purpose, index - num_listed), piece)
                self.unread |= {v} if isinstance(self.labels[v].meaning, InputGradient) else set()
        return why

    def _result(self, instruction: Instruction, purpose: str | Squares, index: int) -> Meaning:
        if isinstance(purpose, Squares):
            return Squares(purpose.first, index)
        if instruction.op in BACKWARD:  # what it makes besides reports and contributions are gradients of inputs
            return InputGradient(instruction.segment, index)
        return Result(purpose, instruction.segment if instruction.op in _PER_PIECE else "", index)


def _listed_label(part: Part, value: int) -> tuple[Label | None, tuple[str, ...], str]:
    """If the part lists a value: its label, the ops that may make it, and the segment that must make it."""
    if value in part.contributions:
        grad = part.contributions[value]
        return Label(Contributed(grad.path, grad.use), grad.piece), BACKWARD, grad.use.rstrip("'")
    if value in part.reports:
        report = part.reports[value]
        return Label(Result("forward", report.segment, report.index), report.piece), ("backward",), report.segment
    if value in part.carried:
        carried = part.carried[value]
        return Label(Carried(carried.segment, carried.index), carried.piece), ("forward",), carried.segment
    return None, (), ""


def _listed_in_words(part: Part, value: int) -> str:
    """What the part says that a listed value is."""
    if value in part.contributions:
        contribution = part.contributions[value]
        return f"a value that the part lists as a contribution of {contribution.use} for piece {_piece_name(contribution.piece)}"
    result = part.reports.get(value) or part.carried[value]
    maker = "backward" if value in part.reports else "forward"
    return f"a value that the part lists as made by the {maker} of {result.segment} for piece {_piece_name(result.piece)}"


def _piece_name(piece: Piece) -> str:
    return f"{piece.microbatch}.{piece.slice}"
