"""Mesh: named axes of ranks. It needs no processes until `bind`: on a laptop a mesh of 16,384 ranks is a few integers.

Ranks are numbered row-major over the axes as written. The last axis varies fastest, so it should be the one with the most
communication (tp).
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpar.errors import MeshError

__all__ = ["Mesh"]


class Mesh:
    """Named mesh axes with sizes, `Mesh(dp=2, fsdp=4, tp=2)`; an axis of size 1 works like an axis that the mesh does not have.

    Raises MeshError if a size is not a positive integer.
    """

    def __init__(self, **sizes: int) -> None:
        invalid = {axis: size for axis, size in sizes.items() if not isinstance(size, int) or isinstance(size, bool) or size < 1}
        if invalid:
            raise MeshError(f"cannot make Mesh({_listing(sizes)}): sizes must be positive integers, not {invalid}")
        self._sizes = dict(sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost (slowest-varying) first."""
        return tuple(self._sizes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis name to size, in mesh order."""
        return dict(self._sizes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self._sizes.values())

    def axis_size(self, axes: str | tuple[str, ...]) -> int:
        """The product of the sizes of `axes`; an axis that the mesh does not have counts as size 1."""
        return math.prod(self._sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes))

    def ordered(self, axes: tuple[str, ...] | set[str] | frozenset[str]) -> tuple[str, ...]:
        """`axes` in mesh order, without those of size 1."""
        return tuple(axis for axis in self._sizes if axis in axes and self._sizes[axis] > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` along each axis."""
        out = {}
        for axis in reversed(self._sizes):
            rank, out[axis] = divmod(rank, self._sizes[axis])
        return {axis: out[axis] for axis in self._sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; axes left out count as 0."""
        rank = 0
        for axis, size in self._sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """The index of `rank` among the ranks that differ from it only along `axes`, first axis major."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self._sizes.get(axis, 1) + coordinates.get(axis, 0)
        return index

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in the order of `index`."""
        coordinates = self.coordinates(rank)
        members = [coordinates]
        for axis in axes:
            members = [{**member, axis: i} for member in members for i in range(self.axis_size(axis))]
        return tuple(self.rank(member) for member in members)

    def groups(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """Every group over `axes`, in the order of their first ranks."""
        seen: set[int] = set()
        for rank in range(self.size):
            if rank not in seen:
                group = self.group(rank, axes)
                seen.update(group)
                yield group

    def split(self, axis: str, outer: int) -> "Mesh":
        """The same ranks with `axis` split into `<axis>_outer` (of size `outer`) and `<axis>_inner`.

        Raises MeshError if `outer` does not divide the axis.
        """
        size = self.axis_size(axis)
        if size % outer:
            raise MeshError(f"cannot split axis {axis!r} of size {size} of {self} into {outer} equal parts")
        parts = {f"{axis}_outer": outer, f"{axis}_inner": size // outer}
        sizes: dict[str, int] = {}
        for name, value in self._sizes.items():
            sizes |= parts if name == axis else {name: value}
        return Mesh(**sizes)

    def bind(self, device_type: str = "cpu") -> DeviceMesh:
        """The DeviceMesh over this job's processes, with one dim for each axis.

        Raises MeshError, before any communication, if the number of processes is not the number of ranks.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != self.size:
            raise MeshError(
                f"cannot bind {self} of {self.size} ranks: {world} process{'es are' if world > 1 else ' is'} running.\n"
                f"Start {self.size} with torchrun and call torch.distributed.init_process_group,"
                f" or choose sizes whose product is {world}."
            )
        return init_device_mesh(device_type, tuple(self._sizes.values()), mesh_dim_names=self.axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self._sizes.items()) == list(other._sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        return f"Mesh({_listing(self._sizes)})"

    def __reduce__(self) -> tuple:
        return _rebuild, (self._sizes,)


def _rebuild(sizes: dict[str, int]) -> Mesh:
    return Mesh(**sizes)


def _listing(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
