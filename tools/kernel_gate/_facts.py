"""Facts: what the compiler's own texts say about a kernel: registers, spills, shared memory, instructions."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Facts", "read_ptxas", "read_sass", "read_ttgir", "read_ttir"]

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALIZED = re.compile(r"\bC751\d\b|wgmma\.mma_async instructions are serialized")
ACCESS = re.compile(r"\btt\.(?:load|store)\b.*: (?:tensor<([\dx]+)x!tt\.ptr<(\w+)>|!tt\.ptr<)")
DOT = re.compile(r"\b(?:tt\.dot(?:_scaled)?|ttng\.warp_group_dot) .*")
BITS = re.compile(r"\d+")


@dataclass
class Facts:
    """Counts of one compiled kernel. `narrow`: instructions that access global memory in less than 128 bits, by mnemonic.
    `scalars`: how many such instructions the kernel needs for values that are too small for wider ones."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    serialized: list[str] = field(default_factory=list)
    matrix: dict[str, int] = field(default_factory=dict)
    narrow: dict[str, int] = field(default_factory=dict)
    local: int = 0
    atomics: int = 0
    tma_loads: int = 0
    scalars: int = 0
    linear: int = 0
    dots: int = 0
    narrow_dots: int = 0  # products that a matrix unit can compute: all but float32 with full precision
    descriptors: int = 0


def read_ptxas(log: str, facts: Facts) -> None:
    """Read what `ptxas -v` prints: registers, spills, and warnings that products are serialised."""
    facts.registers = max((int(count) for count in REGISTERS.findall(log)), default=0)
    facts.spill_bytes = max((max(int(store), int(load)) for store, load in SPILLS.findall(log)), default=0)
    facts.serialized = [line.strip() for line in log.splitlines() if SERIALIZED.search(line)]


def read_sass(sass: str, facts: Facts) -> None:
    """Count the instructions that `cuobjdump -sass` prints."""
    for opcode, count in Counter(INSTRUCTION.findall(sass)).items():
        name, *parts = opcode.split(".")
        if name.endswith("MMA"):
            facts.matrix[name] = facts.matrix.get(name, 0) + count
        elif name in {"LDG", "STG", "LDGSTS"} and not {"128", "256"} & set(parts):
            facts.narrow[opcode] = facts.narrow.get(opcode, 0) + count
        elif name in {"LDL", "STL"}:
            facts.local += count
        elif name in {"RED", "ATOMG"}:
            facts.atomics += count
        elif name == "UTMALDG":
            facts.tma_loads += count


def read_ttgir(ttgir: str, num_warps: int, facts: Facts) -> None:
    """Count linear layouts and narrow accesses in Triton's GPU dialect."""
    facts.linear = ttgir.count("= #ttg.linear<")
    threads = 32 * num_warps
    for sizes, element in ACCESS.findall(ttgir):
        if not sizes:
            facts.scalars += 1
            continue
        count = math.prod(int(size) for size in sizes.split("x"))
        bits = BITS.search(element)
        assert bits is not None, element
        if count * int(bits[0]) < 128 * threads:  # less than 128 bits for each thread
            facts.scalars += max(1, math.ceil(count / threads))


def read_ttir(ttir: str, facts: Facts) -> None:
    """Count products of matrices in Triton's dialect, or for Gluon in the GPU dialect."""
    for line in DOT.findall(ttir):
        facts.dots += 1
        operands = line.rsplit(" : ", 1)[-1].split(" -> ")[0]
        facts.narrow_dots += "inputPrecision = " in line or not re.search(r"xf32>", operands)
