"""Which parameters are matrices of hidden layers, and which of their dims are rows and columns: for Muon and SOAP."""

from mpar.chain import Axes

__all__ = ["matrix_sides"]

_HEADS = ("heads", "kv_heads")


def matrix_sides(path: str, axes: Axes) -> list[int]:
    """How many dims each side of a hidden matrix has; another number of sides than 2 for what is no such matrix."""
    parts = path.split(".")
    if "vocab" in axes or parts[0] in ("embed", "head") or "bias" in parts[-1] or "conv" in parts[-1]:
        return []
    sides: list[int] = []
    previous: str | None = None
    for axis in axes[1:] if axes[:1] == ("expert",) else axes:
        if previous in _HEADS:
            sides[-1] += 1
        else:
            sides.append(1)
        previous = axis
    return sides
