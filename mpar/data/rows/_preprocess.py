"""A user's own function between the columns of a file and the formats that are known."""

from collections.abc import Callable, Mapping, Sequence

from mpar.data.rows._row import RowFault
from mpar.errors import brief
from mpar.plug_ins import PlugIn

__all__ = ["Preprocess", "preprocess_function", "preprocess_plug_in"]

Preprocess = Callable[[Mapping[str, object]], Sequence[Mapping[str, object]]]
"""Gives the rows that stand in place of a row. Raises RowFault for a row with which it cannot be called."""


def preprocess_plug_in(reference: str) -> PlugIn:
    """The plug-in that `module:function` names."""
    return PlugIn("data.preprocess", reference, positional=1)


def preprocess_function(reference: str | None) -> Preprocess:
    """What is done with each row before its format is recognised: nothing if there is no reference.

    Raises ConfigError if the function cannot be imported.
    """
    if reference is None:
        return lambda value: (value,)
    function = preprocess_plug_in(reference).function()

    def preprocess(value: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
        try:
            found = function(dict(value))
        except Exception as error:
            raise RowFault(f"{reference} raised {type(error).__name__}: {brief(str(error))[1:-1]}") from error
        made = found if isinstance(found, list) else [] if found is None else [found]
        rows = [row for row in made if isinstance(row, Mapping)]
        if len(rows) < len(made):
            raise RowFault(f"{reference} returned {brief(found)}, and not a dict, a list of dicts, or None")
        return rows

    return preprocess
