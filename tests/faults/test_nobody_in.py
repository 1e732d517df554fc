"""Nobody gets in: a run on one machine listens on the loopback interface only, and leaves nothing in shared folders."""

import pickle
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

LISTENS = "0A"  # the state in /proc/net/tcp


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """(address, port) of everything that the processes listen on by TCP, over IPv4 and IPv6."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(file.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] != LISTENS or fields[9] not in inodes:
                continue
            address, port = fields[1].split(":")
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
            found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


class _Intruder:
    """What would run code in a process that unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_run_listens_on_loopback_alone_and_unpickles_nothing(start, tmp_path):
    """Every listening socket of launcher and ranks is on 127.0.0.1; a stranger who writes a pickle to each of them runs no code,
    and the run goes on."""
    run = start("steps=400", "checkpoint.every=null")
    run.until_training()
    ranks = run.ranks()
    open_ports = listening([run.process.pid, *ranks])
    assert open_ports, "gloo listens for its own ranks"
    assert {address for address, _ in open_ports} == {"127.0.0.1"}
    assert not [port for _, port in listening([run.process.pid])], "the launcher listens on nothing"
    mark = tmp_path / "intruder"
    for address, port in open_ports:
        with socket.create_connection((address, port), timeout=5) as connection:
            connection.sendall(pickle.dumps(_Intruder(mark)))
    assert run.end() == 0, run.printed
    assert not mark.exists()
    run.check_nothing_left(ranks)


def test_a_second_run_in_the_same_folder_is_refused_before_it_compiles(start):
    """The error names the process that has the folder; nothing is compiled."""
    first = start("steps=100000")
    first.until(lambda: (first.run_dir / "run.lock").exists())
    second = start("steps=5")
    assert second.end() in (1, 2)
    assert f"process {first.process.pid} on {socket.gethostname()}" in second.printed
    assert "prepared in" not in second.printed
