"""The tree of a repository: which files it has, a key that names its present state, and copies of it."""

import hashlib
import shutil
import subprocess
from pathlib import Path

__all__ = ["copy_tree", "files_of", "find_sources", "key_of", "source_at"]


def files_of(root: Path) -> list[str]:
    """Every file that git tracks or would add, by its path from the root."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return sorted(path for path in set(listed.split("\0")) if path and (root / path).is_file())


def find_sources(root: Path, pattern: str) -> dict[str, str]:
    """The Python files that match a glob, such as `mpar/**/*.py`, and their text."""
    known = set(files_of(root))
    paths = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if path.suffix == ".py")
    return {path: (root / path).read_text(encoding="utf-8") for path in paths if path in known}


def key_of(root: Path) -> str:
    """A name for the present state of a tree: its commit, and if files differ from that, a digest of the differences."""
    commit = _git(root, "rev-parse", "HEAD").strip()[:12]
    changes = _git(root, "status", "--porcelain", "-z")
    if not changes:
        return commit
    digest = hashlib.sha256(changes.encode())
    for path in files_of(root):
        digest.update(path.encode() + (root / path).read_bytes())
    return f"{commit}-{digest.hexdigest()[:8]}"


def source_at(root: Path, commit: str, path: str) -> str | None:
    """A file as it was at a commit; None if it was not there."""
    try:
        return _git(root, "show", f"{commit}:{path}")
    except subprocess.CalledProcessError:
        return None


def copy_tree(root: Path, target: Path) -> None:
    """Copy the files of a tree, changes that are not committed included, into a folder of its own."""
    for path in files_of(root):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target / path)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout
