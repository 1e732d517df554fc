"""Writer: writes the instructions of the ranks at one position along pp, one after the other; passes reorder them afterwards."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpar.compiler.build._functions import Functions
from mpar.compiler.build._queues import channel, queue_of
from mpar.compiler.build._values import Values
from mpar.compiler.segment import Code, Target, join_codes
from mpar.ir import Instruction, Kind, Leaf, Piece, SegmentMemory, Value, segment_time
from mpar.ops import constrain
from mpar.spec import P

__all__ = ["Kinds", "Writer"]

_LEAST_GAIN = 0.01  # of the time of two kinds, for which they are joined


@dataclass
class Kinds:
    """The kinds of a program by name, and the code that each was made with; kinds of messages and copies have no code.

    joins: the name of the kind that does what two others do, by these and their operands.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    codes: dict[str, Code] = field(default_factory=dict)
    joins: dict[tuple[str, str, tuple[int, ...]], str | None] = field(default_factory=dict)

    def register(self, code: Code) -> str:
        """Register the kind of `code`; returns its name, with a number if other code has that name already."""
        name, number = code.kind.name, 2
        while name in self.codes and self.codes[name] is not code:
            name, number = f"{code.kind.name} #{number}", number + 1
        self.codes[name], self.kinds[name] = code, code.kind
        return name

    def joined(self, first: str, second: str, operands: tuple[int, ...], target: Target) -> str | None:
        """The kind that does what two others do, on the given operands (see `join_codes`); None if that is predicted to take as
        long as one after the other."""
        key = (first, second, operands)
        if key not in self.joins:
            assert target.hardware is not None
            code = join_codes(self.codes[first], self.codes[second], operands, target)
            alone, together = (
                sum(segment_time(kind, target.mesh, target.hardware) for kind in kinds)
                for kinds in ((self.kinds[first], self.kinds[second]), (code.kind,))
            )
            self.joins[key] = self.register(code) if together < (1 - _LEAST_GAIN) * alone else None
        return self.joins[key]


@dataclass
class Writer:
    """Writes the instructions of one part.

    values, functions, kinds: those of the program, which all parts share.
    has_slices:               whether rows are cut into slices: instructions then name their slice.
    """

    values: Values
    functions: Functions
    kinds: Kinds
    has_slices: bool
    instructions: list[Instruction] = field(default_factory=list)

    def emit(
        self,
        op: str,
        code: Code,
        inputs: Sequence[int],
        names: Sequence[str],
        segment: str = "",
        piece: Piece | None = None,
    ) -> list[int]:
        """Write an instruction that runs `code`; returns its results, which are called `names`.

        A result shares a storage with an operand or another result if the code says so. piece: the piece of the batch that the
        instruction works on; None if it works on no piece or on all of them.
        """
        memory = code.kind.memory
        storages = {local: self.values[v].storage for local, v in zip(memory.inputs, inputs, strict=True)}
        outputs = []
        for name, x, spec, local in zip(names, code.out_values, code.out_specs, memory.outputs, strict=True):
            if local not in storages:
                storages[local] = self.values.storage()
            outputs.append(self.values.add(name, x, spec, storages[local]))
        kind = self.kinds.register(code)
        self._write(piece, Instruction(op, kind, tuple(inputs), tuple(outputs), segment=segment, queue=queue_of(op)))
        return outputs

    def _write(self, piece: Piece | None, instruction: Instruction) -> None:
        """Add an instruction that works on `piece`."""
        if piece is not None:
            instruction = replace(instruction, microbatch=piece.microbatch, slice=piece.slice if self.has_slices else -1)
        self.instructions.append(instruction)

    def send(self, value: int, message: int, peer: int, kind: str, segment: str, piece: Piece | None) -> None:
        """Post a message that holds `value`. kind: F for activations, B for their gradients, G for those of shared parameters."""
        queue = channel("send", peer, kind)
        instruction = Instruction("send", "", (value,), (), segment=segment, queue=queue, message=message, peer=peer)
        self._message(instruction, value, piece)

    def receive(
        self, name: str, x: Tensor, spec: P, message: int, peer: int, kind: str, segment: str, piece: Piece | None
    ) -> int:
        """Post the receipt of a message into a new value that looks like the local tensor `x`."""
        value, queue = self.values.add(name, x, spec), channel("recv", peer, kind)
        instruction = Instruction("recv", "", (), (value,), segment=segment, queue=queue, message=message, peer=peer)
        self._message(instruction, value, piece)
        return value

    def wait(self, value: int, message: int, peer: int, segment: str, piece: Piece | None) -> None:
        """Wait until the message that sends or receives `value` is done."""
        self._message(Instruction("wait", "", (value,), (), segment=segment, message=message, peer=peer), value, piece)

    def _message(self, instruction: Instruction, value: int, piece: Piece | None) -> None:
        """Add a send, recv or wait of `value`, with the kind for values that look like it."""
        v = self.values[value]
        name = _copy_name(instruction.op, v)
        if name not in self.kinds.kinds:
            self.kinds.kinds[name] = message_kind(name, instruction.op, v)
        self._write(piece, replace(instruction, kind=name))

    def copy(self, op: str, value: int, segment: str, piece: Piece | None) -> int:
        """Write a copy of `value` to the host's memory (op "offload"), or back to the device ("fetch"); returns the copy."""
        v = self.values[value]
        name = _copy_name(op, v)
        if name not in self.kinds.kinds:
            self.kinds.kinds[name] = copy_kind(name, op, v)
        copied = self.values.add(v.name, torch.empty(v.shape, dtype=v.dtype, device="meta"), v.spec)
        self._write(piece, Instruction(op, name, (value,), (copied,), segment=segment, queue=queue_of(op)))
        return copied

    def add(
        self,
        left: list[int],
        right: list[int],
        names: Sequence[str],
        segment: str = "",
        piece: Piece | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        highest: Sequence[int] = (),
    ) -> list[int]:
        """Write `left + right`, value by value, on each rank; pending sums stay pending.

        dtypes: those of the sums; None: those of `left`. highest: of which values the higher one counts instead.
        Nothing may read `left` afterwards: the sums are written over it if they fit and it shares no memory with other values.
        """
        own = [self.values[v].dtype for v in left]
        dtypes = own if dtypes is None else list(dtypes)
        over = dtypes == own and all(self.values.lies_alone(v) for v in left)
        code = self.functions.sum(left, right, dtypes, over=over, highest=frozenset(highest))
        out = self.emit("accumulate", code, [*left, *right], names, segment, piece)
        if over:
            self.values.overwritten.update(left)
        return out

    def spread(
        self,
        name: str,
        values: Sequence[int],
        places: Sequence[Sequence[Hashable]],
        order: Sequence[Hashable],
        dtype: torch.dtype,
        op: str,
    ) -> int:
        """Write one vector with an element for each entry of `order`, into which the elements of `values` are put.

        places: for each value, the entries that its elements belong to. All other elements of the vector are 0. Every
        position along pp fills in its own entries, so the vector is a pending sum over pp.
        """
        by_spec: dict[P, list[int]] = {}
        for i, spec in enumerate(self.values.specs(values)):
            by_spec.setdefault(spec, []).append(i)
        given = [entry for indices in by_spec.values() for i in indices for entry in places[i]]
        where = {entry: i for i, entry in enumerate(given)}
        index = [where.get(entry, len(given)) for entry in order]
        zero = torch.zeros(1 if values else len(order), dtype=dtype)

        def spread(parts: list[Tensor]) -> Tensor:
            if not parts:
                return zero.clone()
            vectors = [torch.cat([parts[i].reshape(-1).to(dtype) for i in indices]) for indices in by_spec.values()]
            together = constrain(torch.cat(vectors), P())
            if len(given) < len(order):
                together = torch.cat([together, zero])
            return together if index == list(range(len(order))) else together[torch.tensor(index)]

        args, specs = (self.values.globals(values),), self.values.specs(values)
        code = self.functions.compile(name, spread, args, specs, [P()], variant=tuple(index))
        (vector,) = self.emit(op, code, values, [name])
        if self.values.mesh.axis_size("pp") > 1:
            self.values.values[vector] = replace(self.values[vector], spec=P(partial=("pp",)))
        return vector

    def metric(self, path: str, value: int) -> Leaf:
        """The leaf of a replicated value that the step reports."""
        v = self.values[value]
        return Leaf(path, value, v.shape, v.dtype, v.spec)


def _copy_name(op: str, value: Value) -> str:
    return f"{op} {str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'scalar'}"


def message_kind(name: str, op: str, value: Value) -> Kind:
    """The kind of a send, recv or wait, which has no code: a recv makes a storage, the others hold that of their operand."""
    is_receipt = op == "recv"
    memory = SegmentMemory(
        inputs=() if is_receipt else (0,),
        outputs=(0,) if is_receipt else (),
        sizes=(value.bytes,),
        events=(((0,), ()),) if is_receipt else (),
        workspaces=(0,) if is_receipt else (),
        idle=() if is_receipt else (0,),
    )
    operand = ((value.shape, value.dtype),)
    return Kind(name, "", {}, (), (), 0, memory, 0, () if is_receipt else operand, operand if is_receipt else (), ())


def copy_kind(name: str, op: str, value: Value) -> Kind:
    """The kind of an offload or a fetch. A copy on the host takes no memory of the device."""
    held, copied = (value.bytes, 0) if op == "offload" else (0, value.bytes)  # on the device
    memory = SegmentMemory(inputs=(0,), outputs=(1,), sizes=(held, copied), events=(((1,), (0,)),), workspaces=(0,), idle=())
    transfer_function = "TO_HOST" if op == "offload" else "TO_DEVICE"
    source = f"def run(args, comm):\n    (x,) = args\n    args.clear()\n    return ({transfer_function}(x),)\n"
    operand = ((value.shape, value.dtype),)
    return Kind(name, source, {}, (), (), 0, memory, 0, operand, operand, ())
