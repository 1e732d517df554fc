"""A second model beside the first, in the same program: x is the pair of what both computed, and only the first is trained."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpar.chain import Segment

__all__ = ["REFERENCE", "as_many", "beside", "for_reference", "joined_paths", "of_reference_alone"]

REFERENCE = "reference"
"""Where the parameters of a reference model are in the tree, if they are not those of the policy."""


def for_reference(context: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the context `other` of a reference model that is another one, what differs from `context`, under names of its own."""
    return {f"{REFERENCE}.{key}": x for key, x in other.items() if x is not context.get(key)}


def of_reference_alone(context: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The context as the reference model reads it."""
    beginning = f"{REFERENCE}."
    return {**context, **{key.removeprefix(beginning): x for key, x in context.items() if key.startswith(beginning)}}


@dataclass(frozen=True)
class _InTurn:
    """Functions of segments that follow each other, as that of one segment. reads: which of its parameters each of them reads."""

    fns: tuple[Callable[..., tuple], ...]
    reads: tuple[tuple[int, ...], ...]

    def __call__(self, params: tuple, x: object, context: Mapping[str, Tensor], *, training: bool) -> tuple:
        for fn, reads in zip(self.fns, self.reads, strict=True):
            x = fn(tuple(params[i] for i in reads), x, context, training=training)[0]
        return x, {}


def as_many(segments: Sequence[Segment], count: int) -> list[Segment]:
    """The same function in `count` segments. The first stays the first; those behind it are joined, as evenly as it goes, or
    there are segments between them that do nothing."""
    first, *others = segments
    if count == 1:
        return [_joined(segments)]
    bounds = [round(i * len(others) / (count - 1)) for i in range(count)]
    groups = [others[begin:end] for begin, end in itertools.pairwise(bounds)]
    made, axes = [first], first.out_axes
    for group in groups:
        axes = group[-1].out_axes if group else axes
        made.append(_joined(group) if group else Segment(first.name, _InTurn((), ()), (), axes))
    return made


def _joined(group: Sequence[Segment]) -> Segment:
    if len(group) == 1:
        return group[0]
    paths = tuple(dict.fromkeys(path for segment in group for path in segment.paths))
    reads = tuple(tuple(paths.index(path) for path in segment.paths) for segment in group)
    return Segment(group[0].name, _InTurn(tuple(segment.fn for segment in group), reads), paths, group[-1].out_axes)


@dataclass(frozen=True)
class _Both:
    """The function of a segment of the policy and that of the reference model, one after the other.

    policy_reads, reference_reads: which of the parameters of the segment each of them reads. Losses and metrics are those of the
    policy; the reference model computes as in an evaluation.
    """

    policy: Callable[..., tuple]
    reference: Callable[..., tuple]
    policy_reads: tuple[int, ...]
    reference_reads: tuple[int, ...]

    def __call__(self, params: tuple, x: tuple | None, context: Mapping[str, Tensor], *, training: bool) -> tuple:
        policy_x, reference_x = x or (None, None)
        found = self.policy(tuple(params[i] for i in self.policy_reads), policy_x, context, training=training)
        of_reference = of_reference_alone(context)
        known = self.reference(tuple(params[i] for i in self.reference_reads), reference_x, of_reference, training=False)
        return (found[0], known[0]), *found[1:]


def beside(policy: Segment, reference: Segment, prefix: str) -> Segment:
    """The segment that computes both. prefix: what the paths of the reference model begin with; empty if it reads the parameters
    of the policy, as a model does whose adapter is off."""
    paths, policy_reads, reference_reads = joined_paths(policy, reference, prefix)
    fn = _Both(policy.fn, reference.fn, policy_reads, reference_reads)
    return Segment(policy.name, fn, paths, (policy.out_axes, reference.out_axes))


def joined_paths(policy: Segment, reference: Segment, prefix: str) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The paths that either reads, without repetitions, and for each of the two which of them are its own."""
    others = tuple(f"{prefix}.{path}" if prefix else path for path in reference.paths)
    paths = tuple(dict.fromkeys((*policy.paths, *others)))
    return paths, tuple(map(paths.index, policy.paths)), tuple(map(paths.index, others))
