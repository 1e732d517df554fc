"""The values of a program while it is written. Values are numbered, and so are the storages that they live in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpar.ir import Leaf, Value
from mpar.mesh import Mesh
from mpar.spec import P, local_shape

__all__ = ["Values", "global_value", "like"]


@dataclass
class Values:
    """The values of a program while it is written.

    values:      the values; the number of a value is its index.
    by_storage:  for each storage, the numbers of the values that lie in it.
    overwritten: the numbers of values over which a sum was written.
    """

    mesh: Mesh
    values: list[Value] = field(default_factory=list)
    by_storage: dict[int, list[int]] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)
    num_storages: int = 0

    def __getitem__(self, value: int) -> Value:
        return self.values[value]

    def storage(self) -> int:
        """The number of a new storage."""
        self.num_storages += 1
        return self.num_storages - 1

    def add(self, name: str, x: Tensor, spec: P, storage: int | None = None) -> int:
        """The number of a new value that looks like the local tensor `x`; it gets a new storage unless one is given."""
        storage = self.storage() if storage is None else storage
        self.by_storage.setdefault(storage, []).append(len(self.values))
        self.values.append(Value(name, tuple(x.shape), x.dtype, spec, storage, int(x.storage_offset())))
        return len(self.values) - 1

    def leaf(self, path: str, x: Tensor, spec: P, storage: int | None = None) -> Leaf:
        """The leaf of a new value that goes into the program; `x` is a global tensor without data."""
        local = torch.empty(local_shape(tuple(x.shape), spec, self.mesh), dtype=x.dtype, device="meta")
        return Leaf(path, self.add(path, local, spec, storage), tuple(x.shape), x.dtype, spec)

    def specs(self, values: Sequence[int]) -> list[P]:
        """The specs of values."""
        return [self.values[v].spec for v in values]

    def globals(self, values: Sequence[int]) -> list[Tensor]:
        """The global tensors, without data, of which values are shards."""
        return [global_value(self.values[v].shape, self.values[v].dtype, self.values[v].spec, self.mesh) for v in values]

    def lies_alone(self, value: int) -> bool:
        """Whether a value shares none of its memory with another value that may still be read."""

        def end(v: Value) -> int:
            return v.offset + v.bytes // v.dtype.itemsize

        this = self.values[value]
        others = (self.values[v] for v in self.by_storage[this.storage] if v != value and v not in self.overwritten)
        return all(end(other) <= this.offset or end(this) <= other.offset for other in others)


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without data of the shape of `x`, and of its dtype unless one is given."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")


def global_value(shape: tuple[int, ...], dtype: torch.dtype, spec: P, mesh: Mesh) -> Tensor:
    """The global tensor, without data, of which a rank's shard has this shape."""
    sizes = [n * mesh.axis_size(spec.dim(i)) for i, n in enumerate(shape)]
    return torch.empty(sizes, dtype=dtype, device="meta")
