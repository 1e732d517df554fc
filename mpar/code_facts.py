"""The code that this process runs: what is kept from run to run holds only for the same code. Importing this loads no torch."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from mpar import errors

__all__ = ["code_facts", "digest_of"]


def code_facts(packages: Sequence[str]) -> list[str]:
    """What identifies Python, the machine's architecture, torch's build, these packages and the source of mpar."""
    return [sys.version, platform.machine(), _torch_build(), *map(_version, packages), _source_hash()]


def digest_of(parts: Sequence[tuple[str, bytes]]) -> str:
    """A hash of named contents, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, content in parts:
        digest.update(f"{len(name.encode())} {name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_build() -> str:
    """torch's version and commit, read from its file, because importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).with_name("version.py").read_text(encoding="utf-8")


@functools.cache  # an edit while this process runs changes nothing of what it has imported
def _source_hash() -> str:
    """A hash of all files of mpar from which jobs are made."""
    root = Path(str(errors.__file__)).parent
    paths = sorted(path for suffix in ("py", "yaml", "jsonl", "jinja") for path in root.rglob(f"*.{suffix}"))
    return digest_of([(str(path.relative_to(root)), path.read_bytes()) for path in paths])
