"""Power is lost during a save: whatever order the disk wrote in, as far as fsync leaves it a choice, a readable checkpoint stays.

The changes that a save makes are recorded. Of a prefix of them, up to the moment at which power is lost, everything stays that an
fsync confirmed; of the rest any part may: some bytes of a file and not others, one name in a folder and not another. A file's
bytes are confirmed by its own fsync, its name by that of its folder.
"""

import random
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpar.checkpoint import Keep
from tests.faults.disk import Change, watched_disk
from tests.faults.saves import newest_readable, on_ranks, savers, shards

ORDERS = 200
BLOCK = 512  # a disk writes sectors


@dataclass
class Node:
    """A file or folder, as the disk knows it: without a name."""

    names: dict[str, "Node"] | None = None
    """Of a folder."""
    content: bytearray = field(default_factory=bytearray)

    def at(self, parts: tuple[str, ...]) -> "Node":
        return self if not parts else self.names[parts[0]].at(parts[1:])


class Disk:
    """What the programs see (`root`), and what has not been confirmed: names by folder, blocks of bytes by file."""

    def __init__(self, folder: Path) -> None:
        self.base = folder
        self.root = _read(folder)
        self.lasting = _copy(self.root, {}, self.twins())

    def twins(self) -> dict[int, Node]:
        """By a node that programs see, what of it will last."""
        if not hasattr(self, "_twins"):
            self._twins: dict[int, Node] = {}
            self._pending_names: dict[int, list[dict[str, Node | None]]] = defaultdict(list)
            self._pending_bytes: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
            self._seen: list[Node] = []
        return self._twins

    def apply(self, change: Change) -> None:
        parts = Path(change.path).relative_to(self.base).parts
        if change.op == "fsync":
            self.confirm(self.root.at(parts))
        elif change.op == "write":
            node = self.root.at(parts)
            self._pending_bytes[id(node)].append((len(node.content), change.data))
            node.content += change.data
        else:
            self.change_names(change, parts)

    def change_names(self, change: Change, parts: tuple[str, ...]) -> None:
        parent, name = self.root.at(parts[:-1]), parts[-1]
        if change.op in ("create", "mkdir"):
            assert name not in parent.names, f"{change.path} is overwritten"
            new = Node({} if change.op == "mkdir" else None)
            self._seen.append(new)  # so that its id stays its own
            self._twins[id(new)] = Node({} if change.op == "mkdir" else None)
            edit: dict[str, Node | None] = {name: new}
        elif change.op == "rename":
            assert Path(change.target).parent == Path(change.path).parent, "a rename between folders is two changes"
            edit = {name: None, Path(change.target).name: parent.names[name]}
        else:
            assert change.op in ("unlink", "rmdir"), change
            edit = {name: None}
        self._pending_names[id(parent)].append(edit)
        _edit(parent, edit)

    def confirm(self, node: Node) -> None:
        """What an fsync of `node` promises."""
        for edit in self._pending_names.pop(id(node), ()):
            self._make_last(node, edit)
        for start, data in self._pending_bytes.pop(id(node), ()):
            _put(self._twins[id(node)], start, data)

    def lose_power(self, draw: random.Random) -> Node:
        """The root after power was lost: of what is not confirmed, a random part has come to the disk, in any order."""
        chance = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for key, edits in self._pending_names.items():
            node = next(n for n in (self.root, *self._seen, *_all(self.root)) if id(n) == key)
            for edit in edits:
                if draw.random() < chance:
                    self._make_last(node, edit)
        for key, writes in self._pending_bytes.items():
            blocks = [(start + i, data[i : i + BLOCK]) for start, data in writes for i in range(0, len(data), BLOCK)]
            for start, block in draw.sample(blocks, len(blocks)):
                if draw.random() < chance:
                    _put(self._twins[key], start, block)
        return self._twins[id(self.root)]

    def _make_last(self, node: Node, edit: dict[str, Node | None]) -> None:
        _edit(self._twins[id(node)], {name: None if new is None else self._twins[id(new)] for name, new in edit.items()})


def _read(path: Path) -> Node:
    if path.is_dir():
        return Node({inner.name: _read(inner) for inner in path.iterdir()})
    return Node(None, bytearray(path.read_bytes()))


def _copy(node: Node, memo: dict[int, Node], twins: dict[int, Node]) -> Node:
    names = None if node.names is None else {name: _copy(inner, memo, twins) for name, inner in node.names.items()}
    twins[id(node)] = Node(names, bytearray(node.content))
    return twins[id(node)]


def _all(node: Node) -> list[Node]:
    return [node, *(deep for inner in (node.names or {}).values() for deep in _all(inner))]


def _edit(node: Node, edit: dict[str, Node | None]) -> None:
    for name, new in edit.items():
        if new is None:
            node.names.pop(name, None)
        else:
            node.names[name] = new


def _put(node: Node, start: int, data: bytes) -> None:
    """Bytes between the old end and `start` that never came are zeros."""
    node.content.extend(bytes(max(0, start + len(data) - len(node.content))))
    node.content[start : start + len(data)] = data


def _write(node: Node, path: Path) -> None:
    if node.names is None:
        path.write_bytes(node.content)
        return
    path.mkdir()
    for name, inner in node.names.items():
        _write(inner, path / name)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(the folder before, the changes of saving steps 1 to 3 and keeping the newest, the number of changes after each)."""
    before = tmp_path_factory.mktemp("before")
    run_dir = tmp_path_factory.mktemp("run")
    made, ends = savers(run_dir / "checkpoints", keep=Keep(1)), []
    with pytest.MonkeyPatch.context() as patch, watched_disk(patch, run_dir) as changes:
        (run_dir / "checkpoints").mkdir()  # by somebody who does not wait for the disk
        for step in (1, 2, 3):
            on_ranks(lambda rank: (made[rank].begin(step, shards(step, rank), {}), made[rank].wait()))  # noqa: B023
            ends.append(len(changes))
    moved = [
        Change(c.op, c.path.replace(str(run_dir), str(before)), c.target.replace(str(run_dir), str(before)), c.data)
        for c in changes
    ]
    return before, moved, ends


def orders(full):
    """The seeds of a tier."""
    return range(ORDERS if full else ORDERS // 5)


def test_power_loss(recorded, tmp_path, request):
    """After each loss the newest checkpoint is that of the save under way or the one before, and reads back bit for bit; a save
    that has ended is never lost."""
    before, changes, ends = recorded
    found = set()
    for seed in orders(request.config.option.full):
        draw = random.Random(seed)
        moment = draw.randrange(len(changes) + 1)
        disk = Disk(before)
        for change in changes[:moment]:
            disk.apply(change)
        state = tmp_path / f"{seed}"
        _write(disk.lose_power(draw), state)
        saved = sum(end <= moment for end in ends)
        newest = newest_readable(state / "checkpoints")
        assert newest in (saved, saved + 1), f"seed {seed}: power lost after {moment} changes, the last {changes[moment - 1]}"
        found.add((saved, newest))
        shutil.rmtree(state)
    assert {(0, 0), (1, 1), (2, 2), (2, 3)} & found


def test_a_save_after_power_loss(recorded, tmp_path):
    """A run that goes on from what was left saves again, and removes what the lost save left behind."""
    before, changes, _ = recorded
    for seed in range(5):
        draw = random.Random(seed)
        disk = Disk(before)
        for change in changes[: draw.randrange(len(changes))]:
            disk.apply(change)
        state = tmp_path / f"{seed}"
        _write(disk.lose_power(draw), state)
        made = savers(state / "checkpoints", keep=Keep(1))
        on_ranks(lambda rank: (made[rank].begin(9, shards(9, rank), {}), made[rank].wait()))  # noqa: B023
        assert newest_readable(state / "checkpoints") == 9
        assert [path.name for path in (state / "checkpoints").iterdir()] == ["step_00000009"]
