"""How a proof reports what is wrong with one line of a program."""

from typing import NoReturn

from mpar.errors import ProgramError
from mpar.ir import Instruction, ProgramData

__all__ = ["describe", "fail"]


def describe(instruction: Instruction) -> str:
    """An instruction in few words: `forward layers.3 mb0`."""
    return instruction.words + (f" message {instruction.message}" if instruction.message >= 0 else "")


def fail(program: ProgramData, position: int, line: int, instruction: Instruction, why: str) -> NoReturn:
    """Raise ProgramError: `why` says what is wrong with line `line` of the part at `position`."""
    where = f"pp={position} " if len(program.parts) > 1 else ""
    raise ProgramError(f"invalid program: {where}line {line:04d}, {describe(instruction)}: {why}")
