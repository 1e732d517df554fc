"""A second model beside the first, in the same program: x is the pair of what both computed, and only the first is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpar.chain import Segment

__all__ = ["REFERENCE", "beside"]

REFERENCE = "reference"
"""Where the parameters of a reference model are in the tree, if they are not those of the policy."""


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
        known = self.reference(tuple(params[i] for i in self.reference_reads), reference_x, context, training=False)
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
