"""Writer: where instructions are written down. It numbers values and storages and keeps each compiled segment once.

Parts are written one after the other: `begin` starts the next one's list of instructions.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.ops import constrain
from mpar.ir._memory import SegmentMemory
from mpar.program._program import Instruction, Kind, Leaf, Value
from mpar.compiler.segment._reuse import overwrite_operands
from mpar.compiler.segment._compile import Code, compile_function
from mpar.spec import P, local_shape
from mpar.strategy import AxisTable

__all__ = ["Writer", "like"]


class Writer:
    """A program while it grows."""

    def __init__(self, mesh: Mesh, table: AxisTable, kernels: Kernels, num_slices: int = 1) -> None:
        self.mesh, self.table, self.kernels, self.num_slices = mesh, table, kernels, num_slices
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.kinds: dict[str, Kind] = {}
        self.codes: dict[str, Code] = {}  # by the name of their kind
        self.functions: dict[Any, Code] = {}  # small functions, by name, shapes and specs
        self.by_storage: dict[int, list[int]] = {}  # the values that lie in each
        self.overwritten: set[int] = set()  # values over which a sum was written
        self.sums: dict[Any, Code] = {}  # "add" among them, by what is added
        self.num_storages = 0

    def begin(self) -> None:
        """Start the next part."""
        self.instructions = []

    def storage(self) -> int:
        """A new storage."""
        self.num_storages += 1
        return self.num_storages - 1

    def value(self, name: str, x: Tensor, spec: P, storage: int | None = None) -> int:
        """A new value that looks like the local tensor `x`, in a storage of its own unless one is given."""
        storage = self.storage() if storage is None else storage
        self.by_storage.setdefault(storage, []).append(len(self.values))
        self.values.append(Value(name, tuple(x.shape), x.dtype, spec, storage, int(x.storage_offset())))
        return len(self.values) - 1

    def leaf(self, path: str, x: Tensor, spec: P, storage: int | None = None) -> Leaf:
        """A value at the program's boundary; `x` is global."""
        local = torch.empty(local_shape(tuple(x.shape), spec, self.mesh), dtype=x.dtype, device="meta")
        return Leaf(path, self.value(path, local, spec, storage), tuple(x.shape), x.dtype, spec)

    def specs(self, values: Sequence[int]) -> list[P]:
        """Where values live."""
        return [self.values[v].spec for v in values]

    def globals(self, values: Sequence[int]) -> list[Tensor]:
        """Global tensors without data of which the values are shards."""
        return [self._global(self.values[v].shape, self.values[v].dtype, self.values[v].spec) for v in values]

    def global_results(self, code: Code) -> Any:
        """What a compiled function returns, global and without data."""
        leaves = [self._global(tuple(v.shape), v.dtype, spec) for v, spec in zip(code.out_values, code.out_specs, strict=True)]
        return tree.unflatten(code.outputs, leaves)

    def _global(self, shape: tuple[int, ...], dtype: torch.dtype, spec: P) -> Tensor:
        sizes = [n * self.mesh.axis_size(spec.dim(i)) for i, n in enumerate(shape)]
        return torch.empty(sizes, dtype=dtype, device="meta")

    def emit(
        self,
        op: str,
        code: Code,
        inputs: Sequence[int],
        names: Sequence[str],
        segment: str = "",
        piece: int = -1,
        queue: str = "compute",
    ) -> list[int]:
        """Add an instruction; its results share storages with each other and with operands as the code says.

        piece: of the batch, which it works on: `microbatch * num_slices + slice`; -1 for none.
        """
        memory = code.kind.memory
        storages = {local: self.values[v].storage for local, v in zip(memory.inputs, inputs, strict=True)}
        outputs = []
        for name, x, spec, local in zip(names, code.out_values, code.out_specs, memory.outputs, strict=True):
            if local not in storages:
                storages[local] = self.storage()
            outputs.append(self.value(name, x, spec, storages[local]))
        kind = self._register(code)
        self._add(piece, Instruction(op, kind, tuple(inputs), tuple(outputs), segment=segment, queue=queue))
        return outputs

    def _add(self, piece: int, step: Instruction) -> None:
        """Add an instruction that works on a piece of the batch."""
        if self.num_slices == 1 or piece < 0:
            step = replace(step, microbatch=piece)
        else:
            step = replace(step, microbatch=piece // self.num_slices, slice=piece % self.num_slices)
        self.instructions.append(step)

    def send(self, value: int, message: int, peer: int, segment: str, piece: int, queue: str) -> None:
        """Post a message that holds `value`."""
        self._message("send", (value,), (), value, message, peer, segment, piece, queue)

    def receive(self, name: str, x: Tensor, spec: P, message: int, peer: int, segment: str, piece: int, queue: str) -> int:
        """Post the receipt of a message into a new value that looks like the local tensor `x`."""
        value = self.value(name, x, spec)
        self._message("recv", (), (value,), value, message, peer, segment, piece, queue)
        return value

    def wait(self, value: int, message: int, peer: int, segment: str, piece: int) -> None:
        """Wait until the message that sends or brings `value` is done."""
        self._message("wait", (value,), (), value, message, peer, segment, piece, "compute")

    def _message(
        self,
        op: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        value: int,
        message: int,
        peer: int,
        segment: str,
        piece: int,
        queue: str,
    ) -> None:
        v = self.values[value]
        shape = "x".join(map(str, v.shape)) or "scalar"
        name = f"{op} {str(v.dtype).removeprefix('torch.')} {shape}"
        if name not in self.kinds:
            self.kinds[name] = message_kind(name, op, v)
        step = Instruction(op, name, inputs, outputs, segment=segment, queue=queue, message=message, peer=peer)
        self._add(piece, step)

    def carry(self, op: str, value: int, segment: str, piece: int) -> int:
        """A copy of `value` in the memory of the host ("offload"), or of the device again ("fetch")."""
        v = self.values[value]
        name = f"{op} {str(v.dtype).removeprefix('torch.')} {'x'.join(map(str, v.shape)) or 'scalar'}"
        if name not in self.kinds:
            self.kinds[name] = carry_kind(name, op, v)
        copy = self.value(v.name, torch.empty(v.shape, dtype=v.dtype, device="meta"), v.spec)
        self._add(piece, Instruction(op, name, (value,), (copy,), segment=segment, queue="host"))
        return copy

    def _register(self, code: Code) -> str:
        """The name of the code's kind, a new one when another code has it."""
        name, number = code.kind.name, 2
        while name in self.codes and self.codes[name] is not code:
            name, number = f"{code.kind.name} #{number}", number + 1
        self.codes[name], self.kinds[name] = code, code.kind
        return name

    def function(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Any,
        in_specs: Sequence[P],
        out_specs: Sequence[P | None] | None,
        variant: Hashable = None,
        **how: Any,
    ) -> Code:
        """Compile a small function, or find it: `name` and `variant` must stand for the same mathematics everywhere."""
        shapes = tuple((tuple(x.shape), x.dtype) for x in tree.leaves(args))
        key = (
            name,
            variant,
            shapes,
            tuple(in_specs),
            None if out_specs is None else tuple(out_specs),
            tuple(how.get("passes", ())),
        )
        if key not in self.functions:
            where = (self.mesh, in_specs, out_specs, self.table)
            self.functions[key] = compile_function(name, fn, args, *where, kernels=self.kernels, **how)
        return self.functions[key]

    def cast(self, name: str, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype], source: list[P], target: list[P]) -> Code:
        """Cast each leaf to its dtype, then bring it from `source` to `target`."""

        def cast(values: list[Tensor]) -> list[Tensor]:
            return [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]

        distinct = list(dict.fromkeys(dtypes))
        to = ",".join(str(dtype).removeprefix("torch.") for dtype in distinct)
        which = f" [{''.join(str(distinct.index(dtype)) for dtype in dtypes)}]" if len(distinct) > 1 else ""
        key = name if len(distinct) == 1 and leaves[0].dtype == dtypes[0] else f"{name} to {to}{which}"
        return self.function(key, cast, (list(leaves),), source, target)

    def add(self, left: list[int], right: list[int], names: list[str], segment: str = "", piece: int = -1) -> list[int]:
        """`left + right`, value by value, on each rank: pending sums stay pending. `left` is not read afterwards: the sum is
        written over it, unless something else lies there."""

        def add(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
            return [x + y for x, y in zip(a, b, strict=True)]

        over = all(self._is_alone(v) for v in left)
        like = (over, *((self.values[v].shape, self.values[v].dtype, self.values[v].spec) for v in (*left, *right)))
        if like not in self.sums:
            args, specs = (self.globals(left), self.globals(right)), self.specs([*left, *right])
            name, passes = ("add to", (overwrite_operands,)) if over else ("add", ())
            self.sums[like] = self.function(name, add, args, specs, self.specs(left), passes=passes)
        out = self.emit("accumulate", self.sums[like], [*left, *right], names, segment, piece)
        if over:
            self.overwritten.update(left)
        return out

    def _is_alone(self, value: int) -> bool:
        """Whether nothing else that may still be read lies where the value does."""

        def end(v: Value) -> int:
            return v.offset + v.bytes // v.dtype.itemsize

        own = self.values[value]
        others = (self.values[v] for v in self.by_storage[own.storage] if v != value and v not in self.overwritten)
        return all(end(other) <= own.offset or end(own) <= other.offset for other in others)

    def spread(
        self,
        name: str,
        values: Sequence[int],
        places: Sequence[Sequence[Hashable]],
        order: Sequence[Hashable],
        dtype: torch.dtype,
        op: str,
    ) -> int:
        """One vector with an element for each entry of `order`, of which this part gives those in `places` (per value, a vector,
        its elements' entries). Elsewhere it is 0: the vectors of all positions along pp are a sum that is pending."""
        by_spec: dict[P, list[int]] = {}
        for i, spec in enumerate(self.specs(values)):
            by_spec.setdefault(spec, []).append(i)
        given = [entry for indices in by_spec.values() for i in indices for entry in places[i]]
        where = {entry: i for i, entry in enumerate(given)}
        index = [where.get(entry, len(given)) for entry in order]
        zero = torch.zeros(1 if values else len(order), dtype=dtype)

        def spread(parts: list[Tensor]) -> Tensor:
            if not parts:
                return zero.clone()
            vectors = [torch.cat([parts[i].reshape(-1).to(dtype) for i in own]) for own in by_spec.values()]
            together = constrain(torch.cat(vectors), P())
            if len(given) < len(order):
                together = torch.cat([together, zero])
            return together if index == list(range(len(order))) else together[torch.tensor(index)]

        code = self.function(name, spread, (self.globals(values),), self.specs(values), [P()], variant=tuple(index))
        (vector,) = self.emit(op, code, values, [name])
        if self.mesh.axis_size("pp") > 1:
            self.values[vector] = replace(self.values[vector], spec=P(partial=("pp",)))
        return vector

    def metric(self, path: str, value: int) -> Leaf:
        """A replicated value that the step reports."""
        v = self.values[value]
        return Leaf(path, value, v.shape, v.dtype, v.spec)


def message_kind(name: str, op: str, value: Value) -> Kind:
    """A kind without code: a receipt makes a storage, sending and waiting only keep one."""
    made = op == "recv"
    memory = SegmentMemory(
        inputs=() if made else (0,),
        outputs=(0,) if made else (),
        sizes=(value.bytes,),
        events=(((0,), ()),) if made else (),
        workspaces=(0,) if made else (),
        idle=() if made else (0,),
    )
    whole = ((value.shape, value.dtype),)
    return Kind(name, "", {}, (), 0, 0, 0, memory, 0, () if made else whole, whole if made else (), ())


def carry_kind(name: str, op: str, value: Value) -> Kind:
    """A kind that carries a value to the host, where it takes nothing of the device's memory, or back."""
    held, made = (value.bytes, 0) if op == "offload" else (0, value.bytes)
    memory = SegmentMemory(inputs=(0,), outputs=(1,), sizes=(held, made), events=(((1,), (0,)),), workspaces=(0,), idle=())
    there = "TO_HOST" if op == "offload" else "TO_DEVICE"
    source = f"def run(args, comm):\n    (x,) = args\n    args.clear()\n    return ({there}(x),)\n"
    whole = ((value.shape, value.dtype),)
    return Kind(name, source, {}, (), 0, 0, 0, memory, 0, whole, whole, ())


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without data of the shape of `x`."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")
