"""The orders that a schedule of the user's own gives: a plug-in's result as a table of actions."""

from mpar.errors import ConfigError
from mpar.plug_ins import PlugIn
from mpar.schedules import Action

__all__ = ["orders"]


def orders(plug_in: PlugIn, num_ranks: int, num_chunks: int | None, num_microbatches: int) -> list[list[Action]]:
    """The actions of every position along pp. `num_chunks` is given only if the configuration has it.

    Raises ConfigError if the plug-in returns something else.
    """
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    table = plug_in.call(**sizes, **({} if num_chunks is None else {"num_chunks": num_chunks}))
    expected = f"return for each of the {num_ranks} positions along pp a list of mpar.schedules.Action"
    if not isinstance(table, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in table):
        raise ConfigError(f"{plug_in.label} returned a {type(table).__name__}, not a list of lists: {expected}.")
    strange = next((item for row in table for item in row if not isinstance(item, Action)), None)
    if strange is not None:
        raise ConfigError(f"{plug_in.label} returned a table with {strange!r} among its actions: {expected}.")
    if len(table) != num_ranks:
        raise ConfigError(f"{plug_in.label} returned the actions of {len(table)} positions: {expected}.")
    return [list(row) for row in table]
