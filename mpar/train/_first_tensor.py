"""Finds the first tensor of a step that is not finite, by running the step again without its update and looking at each value."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mpar.program import NO_LIMITS, Limits, Part, Program, RankRun, Replay, State, in_order

__all__ = ["first_not_finite"]

NO_UPDATE = Limits(-NO_LIMITS.loss, -NO_LIMITS.grad_norm)
_RESULTS = 2**16  # more than an instruction has: a line and the index of a result are one number
_BACKWARD = ("backward", "backward_input", "backward_weight")


def first_not_finite(
    program: Program,
    rank: int,
    run: RankRun | Replay,
    state: State,
    batch: Mapping[str, Tensor],
    agree: Callable[[list[float]], list[float]],
) -> str:
    """The first tensor of a step that is not finite, in words, the same on all ranks, which must call this together.

    state: the one that the step began with, and that its skipped update has left; it keeps its values. batch: the rank's batch of
    this step. agree: gives every rank the highest of all ranks' values, one by one. "First" is in the order of the program: of
    several positions along pp, what a later one computes from an earlier one's value comes after it.
    """
    paths = [leaf.path for leaf in program.state_in]
    wrong = (n for n, path in enumerate(paths) if path in state.leaves and not _is_finite(state.leaves[path]))
    number = _least(agree, wrong)
    if number is not None:
        return f"{paths[number]}, which the step began with"
    order = [(position, line) for position, line, _ in in_order(program)]
    number = _least(agree, _wrong_results(program, rank, run, state, batch, order))
    if number is None:
        return "not known: when the step was run again, everything was finite"
    position, line = order[number // _RESULTS]
    instruction = program.parts[position].instructions[line]
    where = f"line {line:04d}" + (f" at pp={position}" if len(program.parts) > 1 else "")
    value = instruction.outputs[number % _RESULTS]
    maker = next(member for member in instruction.alone if value in member.outputs)
    return f"{program.values[value].name}, a result of `{maker.words}` ({where})"


def _least(agree: Callable[[list[float]], list[float]], numbers: Iterable[int]) -> int | None:
    """The least of the first numbers of all ranks; None if no rank has any."""
    (highest,) = agree([-next(iter(numbers), float("inf"))])
    return None if highest == -float("inf") else round(-highest)


def _wrong_results(
    program: Program,
    rank: int,
    run: RankRun | Replay,
    state: State,
    batch: Mapping[str, Tensor],
    order: Sequence[tuple[int, int]],
) -> list[int]:
    """Run the step again; returns the numbers of this rank's results that are not finite, in order."""
    position, part = program.position(rank), program.part(rank)
    numbers = {line: number for number, (where, line) in enumerate(order) if where == position}
    kept, found = _infinite_by_design(part), []

    def look(line: int, results: Sequence[Tensor]) -> None:
        for index, (value, x) in enumerate(zip(part.instructions[line].outputs, results, strict=True)):
            if not (_has_no_nan(x) if value in kept else _is_finite(x)):
                found.append(numbers[line] * _RESULTS + index)

    steps = run.run if isinstance(run, Replay) else run
    again, _ = steps.examined(look)(State(state.take(), state.step - 1), batch, NO_UPDATE)
    state.leaves = again.take()
    return sorted(found)


def _infinite_by_design(part: Part) -> set[int]:
    """Values that may hold infinities in a healthy step, such as masks: contexts, and what forwards keep for their backwards."""
    readers: dict[int, set[tuple[str, str]]] = {}
    instructions = [member for instruction in part.instructions for member in instruction.alone]
    for instruction in instructions:
        for value in instruction.inputs:
            readers.setdefault(value, set()).add((instruction.op, instruction.segment))
    kept = set()
    for instruction in instructions:
        by_backward = {(op, instruction.segment) for op in (*_BACKWARD, "offload")}
        for value in instruction.outputs:
            if instruction.op == "context" or (instruction.op == "forward" and readers.get(value, set()) <= by_backward):
                kept.add(value)
    return kept


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def _has_no_nan(x: Tensor) -> bool:
    return not x.is_floating_point() or not bool(torch.isnan(x).any())
