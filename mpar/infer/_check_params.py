"""The check that parameters which take the place of others are like them."""

from collections.abc import Mapping

from torch import Tensor

from mpar.errors import ShapeError

__all__ = ["check_params"]


def check_params(held: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise ShapeError, listing all problems, unless `given` has the paths, shapes, dtypes and devices of `held`."""
    problems = [f"{path} is missing" for path in held.keys() - given.keys()]
    problems += [f"{path} is no parameter of the model" for path in given.keys() - held.keys()]
    for path in held.keys() & given.keys():
        before, after = ((tuple(x.shape), x.dtype, x.device) for x in (held[path], given[path]))
        if before != after:
            problems.append(f"{path} is {after}, and must be {before}")
    if problems:
        raise ShapeError("cannot answer with these parameters:\n  " + "\n  ".join(sorted(problems)))
