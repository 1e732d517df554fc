"""Table: block sizes, warps and pipeline stages of every kernel, by chip and size class, read from `table.yaml`."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from mpar.errors import KernelError

__all__ = ["TABLE", "Tuning", "classes", "kernels", "replaced", "tuning"]

TABLE = Path(__file__).parent / "table.yaml"


@dataclass(frozen=True)
class Tuning:
    """How one kernel is launched: block sizes by the names of its compile-time parameters, warps, pipeline stages."""

    blocks: Mapping[str, int]
    num_warps: int
    num_stages: int = 1


@functools.cache
def tuning(kernel: str, arch: str, size: str | None = None) -> Tuning:
    """The entry of `kernel` for a chip and a size class. Raises KernelError, which lists its entries, if there is none."""
    entries = _entries()[kernel]
    wanted = [f"{arch} {size}", f"any {size}"] if size is not None else []
    for key in (*wanted, arch, "any"):
        if key in entries:
            return entries[key]
    known = ", ".join(entries)
    raise KernelError(f"kernel {kernel} has no entry for {arch}{'' if size is None else f' {size}'}; table.yaml has {known}")


def classes(kernel: str, arch: str) -> tuple[str, ...]:
    """The size classes that `kernel` has entries for on this chip, in the order of the table."""
    keys = (key.split(" ", 1) for key in _entries()[kernel])
    return tuple(dict.fromkeys(size_class[0] for chip, *size_class in keys if size_class and chip in (arch, "any")))


def kernels() -> tuple[str, ...]:
    """All kernels of the table."""
    return tuple(_entries())


@contextlib.contextmanager
def replaced(kernel: str, key: str, entry: Tuning) -> Iterator[None]:
    """For tuning: in this context `kernel` is launched by `entry` instead of the table's line `key`, "CHIP CLASS" or "CHIP"."""
    entries = _entries()[kernel]
    before = dict(entries)
    entries[key] = entry
    tuning.cache_clear()
    try:
        yield
    finally:
        entries.clear()
        entries.update(before)
        tuning.cache_clear()


@functools.cache
def _entries() -> dict[str, dict[str, Tuning]]:
    text = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {kernel: {str(key): _read(line) for key, line in lines.items()} for kernel, lines in text.items()}


def _read(line: dict[str, int]) -> Tuning:
    launch = {"num_warps", "num_stages"}
    blocks = {name: value for name, value in line.items() if name not in launch}
    return Tuning(MappingProxyType(blocks), **{name: line[name] for name in launch & line.keys()})
