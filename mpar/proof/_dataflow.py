"""Dataflow: every instruction reads what it should. Each value gets a label, which says what it is. Linear in instructions."""

from collections.abc import Iterator, Sequence

from mpar.ir import Instruction, Part, Piece, ProgramData
from mpar.proof._fail import fail
from mpar.proof._gradients import check_gradients
from mpar.proof._labels import Carried, Contributed, Given, InputGradient, Label, Moved, OfSlice, Result, Squares, Terms, What
from mpar.proof._pieces import Pieces
from mpar.proof._step_end import StepEnd

__all__ = ["check_dataflow"]

_MANY = ("weight", "context", "forward", "backward", "backward_input", "backward_weight")  # done for one piece after another
_BACKWARD = ("backward", "backward_input", "backward_weight")


def check_dataflow(program: ProgramData) -> None:
    """Raise ProgramError, naming rank and line, unless

    - what is done for several microbatches is done to the same things of each, and to nothing of another microbatch; of slices
      of its rows, forwards read nothing of later ones, and backwards what these have given back;
    - the weight of the batch is the sum of the weights of its microbatches, the loss is made of all losses;
    - each gradient is the sum of the contributions of every microbatch, each once, reduced as the strategy says. Microbatches are
      added in the order of the schedule, then uses of the parameter in the order of the chain;
    - the norm is made of each gradient once, and each parameter is updated with its own gradient and slots.

    The program's messages must be known to come to an end.
    """
    flow = _Flow(program)
    for position, line, instruction in _in_order(program):
        why = flow.follow(position, instruction)
        if why is not None:
            fail(program, position, line, instruction, why)
    flow.end.check_once()
    check_gradients(program, flow.terms, flow.labels)


def _in_order(program: ProgramData) -> Iterator[tuple[int, int, Instruction]]:
    """All instructions, (position, line, instruction), so that messages are sent before they are waited for."""
    sent: set[int] = set()
    at = [0] * len(program.parts)
    moved = True
    while moved:
        moved = False
        for position, part in enumerate(program.parts):
            while at[position] < len(part.instructions):
                instruction = part.instructions[at[position]]
                if instruction.op == "send":
                    sent.add(instruction.message)
                elif instruction.op == "wait" and instruction.message not in sent:
                    break
                yield position, at[position], instruction
                at[position], moved = at[position] + 1, True


class _Flow:
    """labels: by value. sent: the value that each message holds."""

    def __init__(self, program: ProgramData) -> None:
        self.program, self.terms = program, Terms()
        self.pieces, self.end = Pieces(self.terms, program.num_slices), StepEnd(program, self.terms)
        self.sent: dict[int, int] = {}
        self.labels: dict[int, Label] = {}
        for part in program.parts:
            self._label_boundary(part)

    def _label_boundary(self, part: Part) -> None:
        """Label what is there before the first instruction."""
        for leaf in (*part.state_in, *part.scalars):
            self.labels[leaf.value] = Label(Given(leaf.path))
        for leaf in part.batch:
            key, _, number = leaf.path.rpartition(".")
            piece = self.program.pieces[int(number)]
            shared = len(leaf.shape) == 1  # by all microbatches
            self.labels[leaf.value] = Label(OfSlice(key, piece.slice)) if shared else Label(Given(key), piece)

    def follow(self, position: int, instruction: Instruction) -> str | None:
        """What is wrong with what an instruction reads; labels what it makes."""
        labels = self.labels
        match instruction.op:
            case "send":
                self.sent[instruction.message] = instruction.inputs[0]
            case "wait":
                labels[instruction.inputs[0]] = labels[self.sent[instruction.message]]
            case "accumulate":
                half = len(instruction.outputs)
                for a, b, out in zip(instruction.inputs[:half], instruction.inputs[half:], instruction.outputs, strict=True):
                    labels[out] = self.terms.add(labels[a], labels[b])
            case "offload" | "fetch":
                labels[instruction.outputs[0]] = labels[instruction.inputs[0]]
            case "gather" | "reduce":  # result by result
                for v, out in zip(instruction.inputs, instruction.outputs, strict=True):
                    labels[out] = Label(Moved(instruction.op, labels[v].what), labels[v].piece)
            case "recv":
                pass
            case _:
                return self._compute(position, instruction)
        return None

    def _compute(self, position: int, instruction: Instruction) -> str | None:
        """What is wrong with an instruction that neither moves nor adds values; labels its results."""
        found = [self.labels[v] for v in instruction.inputs]
        purpose, why = self._operands(position, instruction, found)
        why = self._label_results(position, instruction, purpose) or why
        if instruction.op == "norm" and isinstance(purpose, Squares):
            self.end.squares[position] += [self.labels[v] for v in instruction.outputs]
        return why

    def _operands(self, position: int, instruction: Instruction, found: Sequence[Label]) -> tuple[str | Squares, str | None]:
        """What an instruction is for, which is its op but at the end of a step, and what is wrong with its operands."""
        piece, op = instruction.piece, instruction.op
        if piece is not None and op in _MANY:
            return op, self.pieces.problem(instruction, piece, found)
        match op:
            case "weight":
                return op, self.end.weight_problem(found)
            case "finish":
                return self.end.finish(found)
            case "metrics":
                return self.end.report(found)
            case "norm":
                return self.end.norm(position, instruction.inputs, found)
            case "update":
                return op, self.end.update_problem(position, instruction, found)
        return op, None

    def _label_results(self, position: int, instruction: Instruction, purpose: str | Squares) -> str | None:
        """Label what an instruction makes; what is wrong with it, if it makes what another is said to make."""
        part, piece, why = self.program.parts[position], instruction.piece, None
        named = 0  # contributions and losses, which the part lists; results are numbered without them
        for index, v in enumerate(instruction.outputs):
            label, makers, segment = _listed(part, v)
            if label is not None:
                if (segment, label.piece) != (instruction.segment, piece) or instruction.op not in makers:
                    why = f"makes {_said(part, v)}"
                self.labels[v] = label
                named += 1
            else:
                self.labels[v] = Label(self._result(instruction, purpose, index - named), piece)
        return why

    def _result(self, instruction: Instruction, purpose: str | Squares, index: int) -> What:
        if isinstance(purpose, Squares):
            return Squares(purpose.first, index)
        if instruction.op in _BACKWARD:  # all of them give gradients of inputs after losses and contributions
            return InputGradient(instruction.segment, index)
        return Result(purpose, instruction.segment if instruction.op in _MANY else "", index)


def _listed(part: Part, value: int) -> tuple[Label | None, tuple[str, ...], str]:
    """The label of a value of which the part says what it is, the ops that may make it, and of which segment."""
    if value in part.contributions:
        given = part.contributions[value]
        return Label(Contributed(given.path, given.use), given.piece), _BACKWARD, given.use.rstrip("'")
    if value in part.losses:
        loss = part.losses[value]
        return Label(Result("forward", loss.segment, loss.index), loss.piece), ("backward",), loss.segment
    if value in part.carried:
        carried = part.carried[value]
        return Label(Carried(carried.segment, carried.index), carried.piece), ("forward",), carried.segment
    return None, (), ""


def _said(part: Part, value: int) -> str:
    """What a value is said to be, in words."""
    if value in part.contributions:
        given = part.contributions[value]
        return f"a contribution that is said to be that of {given.use}, piece {_number(given.piece)}"
    result = part.losses.get(value) or part.carried[value]
    maker = "backward" if value in part.losses else "forward"
    return f"what is said to be made by the {maker} of {result.segment}, piece {_number(result.piece)}"


def _number(piece: Piece) -> str:
    return f"{piece.microbatch}.{piece.slice}"
