"""Read a compiled module of XLA: its collectives, of how many bytes each, among how many devices."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from bench.functions._wire import sent_bytes

__all__ = ["HloError", "Sent", "sent_by"]

OPS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "shift",
}
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
SAME_ELEMENTS = ("bitcast", "copy", "reshape", "transpose", "convert")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<operands>.*?)\)(?P<rest>.*)"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")


class HloError(Exception):
    """A module has something that this reader does not know."""


@dataclass(frozen=True)
class Sent:
    """One value that a collective carries, under mpar's name of the op, and how many bytes each device sends for it."""

    op: str
    bytes: float


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    rest: str


def sent_by(module: str) -> list[Sent]:
    """What the busiest device sends.

    An all-reduce of which every device only uses its own slice counts as a reduce_scatter, which is what XLA makes of it on
    accelerators. Raises HloError for a collective that runs in a loop or in a form that is not known.
    """
    computations = dict(_computations(module))
    out = []
    for name, instructions in computations.items():
        for each in instructions:
            if each.op.removesuffix("-start").removesuffix("-done") not in OPS:
                continue
            if each.op not in OPS or not _is_entry(module, name):
                raise HloError(f"{each.op} in {name}: only collectives of the entry computation that are not split are counted")
            ranks = _ranks(each.rest)
            for index, size in enumerate(_sizes(each.shape)):
                out.append(_sent(each, index, size, ranks, computations, instructions))
    return [each for each in out if each.bytes]


def _sent(
    each: _Instruction,
    index: int,
    size: int,
    ranks: int,
    computations: dict[str, list[_Instruction]],
    instructions: list[_Instruction],
) -> Sent:
    op = OPS[each.op]
    if op == "shift":
        pairs = re.findall(r"\{(\d+),(\d+)\}", each.rest.split("source_target_pairs={")[1].split("}}")[0] + "}")
        return Sent(op, size if any(source != target for source, target in pairs) else 0)
    if op == "all_reduce":
        name = each.name
        if each.shape.startswith("("):
            parts = [x for x in instructions if x.op == "get-tuple-element" and x.operands == (each.name,)]
            name = next((x.name for x in parts if f"index={index}" in x.rest.split(", ")), "")
        if name and _is_sliced(name, instructions, computations):
            op = "reduce_scatter"
    operand = size / ranks if op == "all_gather" else size * ranks if each.op == "reduce-scatter" else size
    return Sent(op, sent_bytes(op, operand, ranks))


def _is_sliced(name: str, instructions: list[_Instruction], computations: dict[str, list[_Instruction]]) -> bool:
    """Whether all that is done with a value is to take a slice whose place depends on the device."""
    users = [each for each in instructions if name in each.operands]
    return bool(users) and all(_slices(name, user, instructions, computations) for user in users)


def _slices(name: str, user: _Instruction, instructions: list[_Instruction], computations: dict[str, list[_Instruction]]) -> bool:
    if user.op == "dynamic-slice":
        return user.operands[0] == name
    if user.op in SAME_ELEMENTS:
        return _is_sliced(user.name, instructions, computations)
    called = re.search(r"calls=%([\w.\-]+)", user.rest)
    if user.op != "fusion" or called is None:
        return False
    inner = computations[called.group(1)]
    places = [index for index, operand in enumerate(user.operands) if operand == name]
    inside = [x.name for x in inner if x.op == "parameter" and int(x.operands[0]) in places]
    return all(_is_sliced(parameter, inner, computations) for parameter in inside)


def _computations(module: str) -> Iterator[tuple[str, list[_Instruction]]]:
    name, instructions = "", []
    for line in module.splitlines():
        if start := _COMPUTATION.match(line):
            name, instructions = start.group(1), []
        elif line == "}" and name:
            yield name, instructions
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            operands = tuple(part.strip().split(" ")[-1].removeprefix("%") for part in found["operands"].split(","))
            instructions.append(_Instruction(found["name"], found["shape"], found["op"], operands, found["rest"]))


def _is_entry(module: str, name: str) -> bool:
    return f"ENTRY %{name} (" in module


def _sizes(shape: str) -> list[int]:
    """The bytes of each array of a shape or a tuple of shapes."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return [WIDTHS[dtype] * prod(int(n) for n in dims.split(",") if n) for dtype, dims in found]


def _ranks(rest: str) -> int:
    """How many devices take part: of `{{0,1},{2,3}}`, `[2,2]<=[4]` and `mesh['a'=2,'b'=2] {'b'}` two."""
    if "source_target_pairs=" in rest:
        return 2
    groups = rest.split("replica_groups=")[1]
    if groups.startswith("mesh["):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups.split("]")[0]))
        return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", groups.split("{")[1].split("}")[0]))
    if groups.startswith("["):
        return int(groups[1:].split("]")[0].split(",")[-1])
    return len(groups.removeprefix("{{").split("}")[0].split(","))
