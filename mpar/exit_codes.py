"""Exit codes of a command that was asked to stop: those of shells and of timeout(1)."""

__all__ = ["TIME_OVER", "code_of_signal"]

TIME_OVER = 124
"""The time limit of the command was reached."""


def code_of_signal(number: int) -> int:
    """The exit code of a command that the signal `number` stopped."""
    return 128 + number
