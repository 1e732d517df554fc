"""All functions, by kind."""

from bench.functions._algebra import ALGEBRA
from bench.functions._attention import ATTENTION
from bench.functions._case import Function
from bench.functions._derivatives import DERIVATIVES
from bench.functions._losses import LOSSES
from bench.functions._norms import NORMS
from bench.functions._positions import POSITIONS
from bench.functions._routing import ROUTING
from bench.functions._sampling import SAMPLING
from bench.functions._sequence import SEQUENCE
from bench.functions._tables import TABLES

__all__ = ["FUNCTIONS", "KINDS"]

KINDS = {
    "attention": ATTENTION,
    "norms": NORMS,
    "losses": LOSSES,
    "routing": ROUTING,
    "positions": POSITIONS,
    "sequence": SEQUENCE,
    "sampling": SAMPLING,
    "tables": TABLES,
    "derivatives": DERIVATIVES,
    "algebra": ALGEBRA,
}

FUNCTIONS: dict[str, Function] = {function.name: function for kind in KINDS.values() for function in kind}
"""Every function by its name."""
