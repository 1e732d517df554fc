"""The folder of what this user's runs can make anew."""

import os
from pathlib import Path

from mpar.errors import ConfigError

__all__ = ["user_cache"]


def user_cache() -> Path:
    """`mpar` in the folder of this user's caches, by the XDG base directory specification, which ignores relative paths.

    Raises ConfigError if this user has none.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(base if os.path.isabs(base) else Path.home() / ".cache", "mpar")
    except RuntimeError:
        raise ConfigError(
            "cannot find the folder for caches: neither XDG_CACHE_HOME nor HOME is set, and the system does not know this user."
            "\nSet one of them to a folder of yours."
        ) from None
