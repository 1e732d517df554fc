"""States: what a segment keeps from step to step is read and replaced once, by its forward, in the memory in which it lies."""

from mpar.errors import ProgramError
from mpar.ir import STATE, Instruction, ProgramData

__all__ = ["States"]


class States:
    """The state of all parts. old, new: per part, the path of each value before and after the step."""

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.old = [{leaf.value: leaf.path for leaf in part.state_in if leaf.path.startswith(STATE)} for part in program.parts]
        self.new = [{leaf.value: leaf.path for leaf in part.state_out if leaf.path.startswith(STATE)} for part in program.parts]

    def problem(self, position: int, instruction: Instruction) -> str | None:
        """What is wrong with what an instruction does with state, or None. An instruction that reads state is the forward that
        writes its new version over it; a kind of several joined instructions reads none."""
        old, new = self.old[position], self.new[position]
        read = {old[v]: i for i, v in enumerate(instruction.inputs) if v in old}
        made = {new[v]: v for v in instruction.outputs if v in new and v not in old}
        if read.keys() != made.keys():
            return f"reads the state {sorted(read)} and makes that of {sorted(made)}: it must replace what it reads"
        if read and instruction.op != "forward":
            return f"replaces the state {sorted(read)}, which only a forward may do"
        values = self.program.values
        for path, index in read.items():
            before, after = values[instruction.inputs[index]], values[made[path]]
            in_place = (before.storage, before.offset, before.shape, before.dtype)
            if in_place != (after.storage, after.offset, after.shape, after.dtype):
                return f"does not write the new {path} over the old one"
            if index not in self.program.kinds[instruction.kind].overwrites:
                return f"returns the new {path} in the memory of the old one without writing there"
        return None

    def check_all(self) -> None:
        """Raise ProgramError unless each part keeps the same state before and after the step, and replaces each path once."""
        for position, (old, new) in enumerate(zip(self.old, self.new, strict=True)):
            kept = sorted(path for v, path in new.items() if v in old)
            if sorted(old.values()) != sorted(new.values()) or kept:
                where = f"pp={position} " if len(self.program.parts) > 1 else ""
                raise ProgramError(f"invalid program: {where}reads the state {sorted(old.values())}, does not replace {kept}")
