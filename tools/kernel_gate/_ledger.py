"""Ledger: registers, spills and shared memory of every kernel, by version of Triton and chip, as they were last accepted."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LEDGER", "line", "read", "write"]

LEDGER = Path(__file__).resolve().parent / "registers.json"


def read(path: Path, version: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The lines of the ledger by chip and kernel; empty where nothing was recorded with this version of Triton."""
    return json.loads(path.read_text(encoding="utf-8")).get(version, {}) if path.exists() else {}


def line(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the ledger says of a compiled kernel."""
    facts = result["facts"]
    return {key: facts[key] for key in ("registers", "spill_bytes", "shared_bytes")} | {"hash": result["hash"]}


def write(path: Path, version: str, results: Iterable[Mapping[str, Any]], keep: Iterable[tuple[str, str]]) -> None:
    """Write `results` into the ledger, and drop lines that are neither among them nor in `keep`, pairs of (chip, kernel)."""
    everything = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    old, new = everything.get(version, {}), {}
    for arch, key in keep:
        if key in old.get(arch, {}):
            new.setdefault(arch, {})[key] = old[arch][key]
    for result in results:
        new.setdefault(result["arch"], {})[result["key"]] = line(result)
    everything[version] = new
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(everything), encoding="utf-8")


def _text(everything: Mapping[str, Any]) -> str:
    """The ledger as text, with one line for each kernel, so that diffs are easy to read."""
    versions = []
    for version in sorted(everything):
        archs = []
        for arch in sorted(everything[version]):
            kernels = everything[version][arch]
            lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(kernels[key])}" for key in sorted(kernels))
            archs.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(archs) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"
