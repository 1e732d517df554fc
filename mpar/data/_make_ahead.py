"""The process that makes the blocks of a stream ahead: `python -m mpar.data._make_ahead`. Its standard input says what to make.

It ends when its standard input does, which is when the process that started it ends.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mpar.data._block_folder import BlockFolder
from mpar.data._cache import Entry, load_entry, save_entry
from mpar.data._cursor import Cursor
from mpar.data._stream_blocks import BlockMaker, Stream
from mpar.errors import MparError

__all__ = ["Order", "main", "make_missing"]

_AHEAD = 2  # blocks behind the one that a reader stands in
_LOOK_S = 0.01
_PATIENCE_S = 3.0  # for a block that is being made


@dataclass(frozen=True)
class Order:
    """What to make, in which folder, and on how many processes."""

    stream: Stream
    folder: Path
    key: str
    workers: int


def main(source: BinaryIO, answer: BinaryIO) -> int:
    """Make blocks until `source` ends. What went wrong is written to `answer`; then the exit code is 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its other threads would take the time of the training
    order: Order = pickle.load(source)  # of the process that started this one

    def end_with_source() -> None:
        os.read(source.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE_S)
        os._exit(1)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that nothing half stays behind
    threading.Thread(target=end_with_source, daemon=True).start()
    folder = BlockFolder(order.folder, order.key)
    try:
        with folder.locked(), BlockMaker(order.stream, order.workers) as maker:
            known: dict[str, Cursor] = {}
            while True:
                wanted = folder.wanted()
                if wanted:
                    folder.delete_outside(wanted[0].block, wanted[-1].block + _AHEAD)
                if not any(make_missing(maker, folder, cursor, known) for cursor in wanted):
                    time.sleep(_LOOK_S)
    except MparError as error:
        answer.write(pickle.dumps(error))
        return 1


def make_missing(maker: BlockMaker, folder: BlockFolder, cursor: Cursor, known: dict[str, Cursor]) -> bool:
    """Make the first block that is not there of those from `cursor` on; returns whether there was one.

    known: by the key of a block, the cursor behind it, which is added.
    """
    for _ in range(1 + _AHEAD):
        key, path = folder.key_of(cursor), folder.entry_of(cursor)
        if not path.is_dir() or key not in known:
            found = load_entry(path, key)
            if not isinstance(found, Entry):
                made = maker.make(cursor)
                save_entry(path, key, made, replaced=bool(found))
                known[key] = _behind(made.following)
                return True
            known[key] = _behind(found.following)
        cursor = known[key]
    return False


def _behind(following: Mapping[str, object] | None) -> Cursor:
    assert following is not None
    return Cursor.from_json(following)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer, sys.stdout.buffer))
