"""Processes that carry out a function: order, errors, who works, and a process that is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpar.data._workers import Workers
from mpar.errors import DataError


def square(shared, item):
    """The process, and `shared` times the square of an item. Even items take longer, so that later ones are done before them."""
    time.sleep(0.002 * (item % 2 == 0))
    return os.getpid(), shared * item**2


def refuse(shared, item):
    """Refuses two items. The later one is refused at once."""
    if item == 8:
        time.sleep(0.2)
    if item in (8, 9):
        raise DataError(f"item {item}")
    return item


def kill_another(shared, item):
    """Ends a process, unless it is the one of the test."""
    if os.getpid() != shared:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return item


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_from_so_many_processes(count):
    """Results stand in the order of their items; `count` processes work, and the one that asked is one of them."""
    with Workers(square, 3, count) as workers:
        found = list(workers.map(range(600 * (count - 1) + 5)))
    assert [(item, value) for item, (_, value) in found] == [(item, 3 * item**2) for item in range(len(found))]
    processes = {process for _, (process, _) in found}
    assert os.getpid() in processes and len(processes) == count


def test_an_error_comes_in_the_order_of_items():
    """All results before the first item that is refused come, then its error, though a later item was refused before it."""
    found = []
    with pytest.raises(DataError, match="item 8"), Workers(refuse, None, 2) as workers:
        found.extend(item for item, _ in workers.map(range(40)))
    assert found == list(range(8))


def test_a_killed_process_is_an_error():
    """A process that was killed ends the work with a message that says what to change."""
    expected = r"one of the 2 processes that tokenise was killed(.|\n)*data\.workers"
    with pytest.raises(DataError, match=expected), Workers(kill_another, os.getpid(), 2) as workers:
        list(workers.map(range(200)))


def test_giving_up_early_is_quiet():
    """If there are no more items because reading them failed, a process that has not begun yet ends without a word."""
    lines = (
        "import operator; from mpar.data._workers import Workers",
        "def items():",
        "    yield 1",
        "    raise KeyError('unreadable')",
        "try:",
        "    with Workers(operator.add, 1, 2) as workers: list(workers.map(items()))",
        "except KeyError as error: print(error)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("'unreadable'\n", "")


def test_the_environment_is_as_before(monkeypatch):
    """This process works on one core only while it works with others."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with Workers(square, 3, 2) as workers:
        seen = {os.environ.get("TOKENIZERS_PARALLELISM") for _ in workers.map(range(5))}
    assert seen == {None}
