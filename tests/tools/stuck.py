"""A worker of the gate that stands for a compiler which crashes."""

import os

__all__ = ["compiles_or_ends"]


def compiles_or_ends(units: list[dict[str, str]], out: str) -> list[dict[str, object]]:
    """The unit called "crash" ends the process, as a compiler that crashes does; all others pass."""
    if units[0]["key"] == "crash":
        os._exit(11)
    return [{**unit, "facts": None, "failures": [], "seconds": 0.0} for unit in units]
