"""Rows of the table of kernels, one file for each family, in the order in which they are measured while there is time."""

from bench.kernels._row import Row
from bench.kernels.rows import attention, experts, fp8, gates, losses, merge, norms, optimizer, rope
from tools.kernel_shapes import SSD

__all__ = ["all_rows", "long_rows"]

ORDER = (1, 12, 10, 4, 13, 15, 9, 11, 19, 21, 2, 3, 5, 20, 18, 24, 23, 17, 14, 6, 7, 8, 16, 22)
"""Numbers of rows, the most telling first, so that the rows that are left out when time is over tell the least."""

NOT_BUILT = [Row(22, "ssd", None, SSD, missing="there is no kernel yet")]


def all_rows() -> tuple[Row, ...]:
    """Every row of the table, the most telling ones first."""
    families = (attention, experts, fp8, gates, losses, merge, norms, optimizer, rope)
    rows = [row for family in families for row in family.ROWS] + NOT_BUILT
    return tuple(sorted(rows, key=lambda row: ORDER.index(row.number)))


def long_rows() -> tuple[Row, ...]:
    """Rows that only the long form has: other dtypes and sizes."""
    return tuple(attention.LONG_ROWS)
