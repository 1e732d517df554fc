"""Frozen: training changes no frozen parameter and keeps nothing for one, and it changes every other parameter."""

from mpar.errors import ProgramError
from mpar.ir import Part, ProgramData
from mpar.proof._fail import fail

__all__ = ["check_frozen"]


def check_frozen(program: ProgramData) -> None:
    """Raise ProgramError unless a parameter that is frozen has no gradient and no slots of the optimizer, no instruction writes
    over it, and the step returns it as it was; and every other parameter is new after the step. A program without an optimizer
    returns all parameters as they were.
    """
    frozen = set(program.facts.frozen)
    for position, part in enumerate(program.parts):
        where = f"pp={position} " if len(program.parts) > 1 else ""
        wrong = [f"{path} is frozen, but has a gradient" for path in sorted(frozen & _with_gradient(part))]
        wrong += [f"{path} belongs to a frozen parameter" for path in _slots_of(part, frozen)]
        wrong += _wrongly_returned(part, frozen, trains=program.facts.optimizer is not None)
        if wrong:
            raise ProgramError(f"invalid program: {where}" + "; ".join(wrong))
        kept = {leaf.value: leaf.path for leaf in part.state_in if leaf.path.removeprefix("params.") in frozen}
        path_in = {program.values[v].storage: path for v, path in kept.items()}
        for line, instruction in enumerate(part.instructions):
            for index in program.kinds[instruction.kind].overwrites:
                path = path_in.get(program.values[instruction.inputs[index]].storage)
                if path is not None:
                    fail(program, position, line, instruction, f"writes over {path}, which is frozen")


def _with_gradient(part: Part) -> set[str]:
    return {contribution.path for contribution in part.contributions.values()} | set(part.gradients)


def _slots_of(part: Part, frozen: set[str]) -> list[str]:
    """The slots of the optimizer that belong to frozen parameters."""
    slots = (leaf.path for leaf in part.state_in if leaf.path.startswith("opt."))
    return [path for path in slots if path.split(".", 2)[-1] in frozen]


def _wrongly_returned(part: Part, frozen: set[str], *, trains: bool) -> list[str]:
    """What is wrong with the parameters that a step returns."""
    before = {leaf.path: leaf.value for leaf in part.state_in if leaf.path.startswith("params.")}
    after = {leaf.path: leaf.value for leaf in part.state_out if leaf.path.startswith("params.")}
    if before.keys() != after.keys():
        return [f"the parameters {sorted(before.keys() ^ after.keys())} are not both read and returned"]
    fixed = {path for path in before if not trains or path.removeprefix("params.") in frozen}
    changed = [f"{path} is changed, which is frozen or belongs to an evaluation" for path in fixed if before[path] != after[path]]
    return changed + [f"{path} is not updated" for path in before if path not in fixed and before[path] == after[path]]
