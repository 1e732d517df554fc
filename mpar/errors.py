"""What mpar raises if it cannot do what a user asks. A message says what was attempted, which facts disagree, and what to do."""

import reprlib
from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferentiationError",
    "DtypeError",
    "KernelError",
    "MeshError",
    "MparError",
    "NumericsError",
    "PlainDataError",
    "ProgramError",
    "RewardError",
    "RolloutError",
    "ShapeError",
    "ShardingError",
    "TraceError",
    "UnknownNameError",
    "brief",
    "exit_code",
    "first_lines",
]

_MOST_LINES = 8
_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxother = 80
_SHORTENED.maxlist = _SHORTENED.maxdict = _SHORTENED.maxtuple = 8
_SHORTENED.maxlevel = 3


def brief(value: object) -> str:
    """`repr(value)` for a message: long texts and collections from input files are cut, deep ones too."""
    return _SHORTENED.repr(value)


def first_lines(problems: Sequence[str]) -> str:
    """Problems of the lines of a file, below each other in a message; the number of those behind the first few."""
    more = [f"and {len(problems) - _MOST_LINES} more lines"] if len(problems) > _MOST_LINES else []
    return "\n  ".join([*problems[:_MOST_LINES], *more])


class MparError(Exception):
    """Base of every error that mpar raises on purpose."""


class ConfigError(MparError, ValueError):
    """A configuration names something unknown, or two of its values disagree."""


class UnknownNameError(ConfigError):
    """A name (config key, architecture, strategy, primitive) that is not in the list of known ones."""


class MeshError(MparError, ValueError):
    """A mesh that cannot exist, or a world of processes that does not match it."""


class ShardingError(MparError, ValueError):
    """A tensor cannot be placed as its spec says, or the specs in a graph do not fit each other."""


class ShapeError(MparError, ValueError):
    """Operands whose shapes do not fit each other or the op."""


class DtypeError(MparError, TypeError):
    """Operands whose dtypes the op does not accept."""


class RolloutError(MparError, ValueError):
    """Answers could not be drawn: the environment of a conversation raised, or returned what is no message."""


class RewardError(RolloutError):
    """A function that rewards answers raised, or returned what is no reward."""


class TraceError(MparError, TypeError):
    """A function that cannot be compiled: randomness, mutation or data-dependent shapes inside it."""


class DifferentiationError(MparError, RuntimeError):
    """A derivative was asked for, but an op has no rule for it."""


class ProgramError(MparError, RuntimeError):
    """A program that does not verify, or that could not be run to its end."""


class PlainDataError(MparError, ValueError):
    """Something that cannot be written as plain data, or a text of plain data that is damaged or of another version."""


class DataError(MparError, ValueError):
    """Training data that cannot be used."""


class CheckpointError(MparError, ValueError):
    """A checkpoint or a folder of weights that is missing, damaged, or of another model."""


class NumericsError(MparError, ArithmeticError):
    """A loss or gradient that is not finite."""


class KernelError(MparError, RuntimeError):
    """A kernel was asked to do what it cannot: a size, dtype, device or chip that it has no entry for."""


def exit_code(error: MparError) -> int:
    """The exit code of a process that `error` ended: 2 if nothing ran because what was asked for cannot be, else 1."""
    return 2 if isinstance(error, ConfigError | MeshError | ShardingError | ShapeError | KernelError) else 1
