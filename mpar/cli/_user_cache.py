"""The folder of what this user's runs can make anew."""

import os
from pathlib import Path

__all__ = ["user_cache"]


def user_cache() -> Path:
    """`mpar` in the folder of this user's caches, by the XDG base directory specification, which ignores relative paths."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache", "mpar")
