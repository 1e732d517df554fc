"""Freeze: a model of which training leaves some parameters as they are, chosen by names, by segments, or by depth."""

import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mpar import tree
from mpar.chain import Chain
from mpar.errors import ConfigError, UnknownNameError
from mpar.models._model import Model, Trainable
from mpar.models._wrapped import WrappedModel
from mpar.models.hf import stored_leaves

__all__ = ["FrozenModel", "freeze", "with_frozen"]


@dataclass(frozen=True)
class FrozenModel(WrappedModel):
    """`base`, of which training does not change the parameters at `paths`."""

    base: Trainable
    paths: frozenset[str]

    @property
    def frozen(self) -> frozenset[str]:
        """`paths`."""
        return self.paths


def freeze(
    model: Trainable,
    *,
    names: Sequence[str] = (),
    segments: Sequence[str] = (),
    ratio: float = 0.0,
    trainable: Sequence[str] = (),
) -> Trainable:
    """`model`, of which training does not change some parameters: they have no gradient and no state of an optimizer.

    names:     patterns such as `layers.[0-3].*`, of paths of parameters or of names of Hugging Face tensors. A pattern that
               matches what comes before a dot stands for all that follows: `embed` is `embed.*`.
    segments:  patterns of names of segments, such as `layers.1?`: all that they read.
    ratio:     the share of the numbers of the model that is frozen from its beginning on: whole parameters in the order of the
               chain, as long as they have no more numbers together than this share of all.
    trainable: patterns like `names`, of what is trained in spite of these, and in spite of what is frozen in `model` already.

    Raises UnknownNameError, with the nearest names, for patterns that match nothing; ConfigError for a ratio that is no share,
    for a pattern that matches only a part of a parameter, and if nothing remains to be trained.
    """
    if not 0 <= ratio <= 1:
        raise ConfigError(f"cannot freeze a share of {ratio} of the parameters: it must be between 0 and 1")
    known = _Known(model)
    known.check(names, segments, trainable)
    chosen = set(known.named(names)) | set(known.first(ratio)) | set(known.of_segments(segments))
    frozen = (model.frozen | chosen) - set(known.named(trainable))
    if frozen == model.frozen:
        return model
    if not set(known.paths) - frozen - set(model.updates):
        raise ConfigError(
            f"cannot freeze all {len(known.paths)} parameters of {model.name}: nothing would be trained.\n"
            "Freeze fewer, or say which are trained all the same (trainable)."
        )
    return FrozenModel(model, frozen)


def with_frozen(model: Trainable, paths: frozenset[str]) -> Trainable:
    """`model`, of which training changes none of these parameters; paths that it does not have do not count."""
    frozen = paths.intersection(tree.paths(model.abstract_params))
    return model if frozen == model.frozen else FrozenModel(model, frozen)


class _Known:
    """The parameters of a model, and the names by which they may be chosen."""

    def __init__(self, model: Trainable) -> None:
        self.model = model
        self.paths = _in_chain_order(model)

    @functools.cached_property
    def stored(self) -> dict[str, list[str]]:
        """For the path of each parameter, the names of the Hugging Face tensors that hold it; a frozen or adapted model has those
        of the model that it was made of."""
        model = self.model
        while not isinstance(model, Model) and isinstance(base := getattr(model, "base", None), Trainable):
            model = base
        return {path: list(leaf.names) for path, leaf in stored_leaves(model).items()} if isinstance(model, Model) else {}

    def named(self, patterns: Iterable[str]) -> list[str]:
        """The parameters that match any of these patterns, by their path or by all names under which they are stored."""
        matches = [_matcher(pattern) for pattern in patterns]
        return [path for path in self.paths if any(self._is_named(path, matcher) for matcher in matches)]

    def _is_named(self, path: str, matcher: Callable[[str], bool]) -> bool:
        stored = self.stored.get(path, [])
        return matcher(path) or (bool(stored) and all(map(matcher, stored)))

    def of_segments(self, patterns: Iterable[str]) -> list[str]:
        """The parameters that segments read whose names match any of these patterns."""
        matches = [_matcher(pattern) for pattern in patterns]
        read = [place for s in self.model.segments if any(m(s.name) for m in matches) for place in s.paths]
        return [path for path in self.paths if any(f"{path}.".startswith(f"{place}.") for place in read)]

    def first(self, ratio: float) -> list[str]:
        """The first parameters of the chain that together have at most this share of all numbers. Raises ConfigError if there are
        none."""
        leaves = dict(tree.leaves_with_path(self.model.abstract_params))
        sums = list(itertools.accumulate(leaves[path].numel() for path in self.paths))
        found = [path for path, total in zip(self.paths, sums, strict=True) if total <= int(sums[-1] * ratio)]
        if ratio and not found:
            raise ConfigError(
                f"cannot freeze a share of {ratio} of the parameters of {self.model.name}: the first one, {self.paths[0]}, has "
                f"{sums[0] / sums[-1]:.3f} of all numbers, and parameters are frozen as a whole."
            )
        return found

    def check(self, names: Sequence[str], segments: Sequence[str], trainable: Sequence[str]) -> None:
        """Raise UnknownNameError for patterns that match nothing, ConfigError for those that match a part of a parameter."""
        wrong = [*self._wrong("names", names), *self._wrong("trainable", trainable)]
        of_segments = [segment.name for segment in self.model.segments]
        for pattern in segments:
            if not any(map(_matcher(pattern), of_segments)):
                wrong.append(f"segments: no segment matches {pattern!r}{_near(pattern, of_segments)}")
        if wrong:
            raise UnknownNameError(f"cannot freeze parameters of {self.model.name}:\n  " + "\n  ".join(wrong))
        parts = [line for pattern in (*names, *trainable) for line in self._parts(pattern)]
        if parts:
            raise ConfigError(f"cannot freeze a part of a parameter of {self.model.name}:\n  " + "\n  ".join(parts))

    def _wrong(self, option: str, patterns: Sequence[str]) -> Iterator[str]:
        """A line for each pattern that matches no parameter and no stored name."""
        stored = dict.fromkeys(name for of_path in self.stored.values() for name in of_path)
        for pattern in patterns:
            if not any(map(_matcher(pattern), (*self.paths, *stored))):
                yield f"{option}: no parameter matches {pattern!r}{_near(pattern, (*self.paths, *stored))}"

    def _parts(self, pattern: str) -> Iterator[str]:
        """A line for each parameter of which a pattern matches some of the tensors in which it is stored, and not all."""
        matcher = _matcher(pattern)
        for path, names in self.stored.items():
            matched = [name for name in names if matcher(name)]
            if matched and len(matched) < len(names) and not matcher(path):
                yield f"{pattern!r} matches {len(matched)} of the {len(names)} tensors of {path}, such as {matched[0]}"


def _in_chain_order(model: Chain) -> list[str]:
    """The paths of all parameters, in the order in which the segments read them."""
    paths = tree.paths(model.abstract_params)
    places = [place for segment in model.segments for place in segment.paths]
    return list(dict.fromkeys(path for place in places for path in paths if f"{path}.".startswith(f"{place}.")))


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name, or what comes before one of its dots, matches a pattern."""
    return lambda name: fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _near(pattern: str, names: Sequence[str]) -> str:
    """The names that are most like a pattern, in words."""
    places: Mapping[str, None] = dict.fromkeys(
        ".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)
    )
    found = difflib.get_close_matches(pattern, list(places), n=3, cutoff=0.0)
    return f"; the nearest are {', '.join(found)}"
