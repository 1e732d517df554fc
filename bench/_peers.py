"""The peers: programs outside this repository that train the same workload with torch, torchtitan or transformers.

They are plain modules that import each other by name, so their folder goes on the module path.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["DEFAULT_FOLDER", "PeersMissing", "find_peers", "peer"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[1].parent / "shared" / "peers"
_NEEDED = ("workload.py", "torch_spmd.py", "floor.py", "hf_eager.py", "ranks.py")


class PeersMissing(Exception):
    """The folder of the peers is not where it was looked for."""


def find_peers(folder: str | Path | None) -> Path:
    """The peers' folder, checked. Raises PeersMissing, which says what is missing and how to name another folder."""
    path = Path(folder) if folder else DEFAULT_FOLDER
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        raise PeersMissing(
            f"the peers are not in {path}: {', '.join(missing)} not found.\n"
            "They are the torch, torchtitan and transformers programs that this benchmark compares with, and no part of mpar.\n"
            "Name their folder by --peers FOLDER or by the environment variable MPAR_PEERS."
        )
    return path.resolve()


def peer(folder: Path, name: str) -> ModuleType:
    """The peers' module `name`."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)
