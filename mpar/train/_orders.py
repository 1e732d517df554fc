"""The orders that a schedule of the user's own gives: a plug-in's result as a table of actions."""

from mpar.errors import ConfigError
from mpar.plug_ins import PlugIn
from mpar.schedules import Action, check_table

__all__ = ["orders"]


def orders(plug_in: PlugIn, num_ranks: int, num_chunks: int | None, num_microbatches: int) -> list[list[Action]]:
    """The actions of every position along pp. `num_chunks` is given only if the configuration has it.

    Raises ConfigError if the plug-in returns something else.
    """
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    table = plug_in.call(**sizes, **({} if num_chunks is None else {"num_chunks": num_chunks}))
    try:
        check_table(table)
        if len(table) != num_ranks:  # type: ignore[arg-type]
            raise ConfigError(f"the table of a schedule has {len(table)} rows, and pp has {num_ranks} positions")  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{plug_in.label}: {error}") from None
    return [list(row) for row in table]  # type: ignore[attr-defined]
