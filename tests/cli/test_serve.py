"""`mpar serve` as a process: it says where it listens, lets answers come to their end when it is stopped, refuses bad keys."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from mpar.cli._serve import _listen
from mpar.cli.main import main
from mpar.infer import Sampling
from mpar.train.answers import load_assistant
from tests.cli.conftest import environment
from tests.cli.test_generate import adapter_folders, chosen, folder

__all__ = ["adapter_folders", "folder"]


@contextmanager
def serving(folder, *keys: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process of a server, which is killed in the end, and its address."""
    command = [sys.executable, "-m", "mpar", "serve", f"path={folder}", "port=0", *keys]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            found = (re.search(r"http://127.0.0.1:\d+", line) for line in process.stderr)  # lines on compiling come before
            yield process, next(address[0] for address in found if address)
        finally:
            process.kill()


def children(process: subprocess.Popen) -> list[int]:
    """The processes that a process has started and that are ranks."""
    found = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
    numbers = [int(word) for file in found for word in file.read_text().split()]
    return [n for n in numbers if "_follower" in pathlib.Path(f"/proc/{n}/cmdline").read_text()]


def is_there(number: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full("processes that load torch")
@pytest.mark.parametrize(("mesh", "number"), [("one", signal.SIGTERM), ("tp2", signal.SIGINT)])
def test_a_signal_lets_answers_come_to_their_end(folder, mesh, number):
    """A signal in the middle of a stream: it ends as it would have, then all processes, and no traceback is printed."""
    with serving(folder, f"mesh={mesh}") as (process, address):
        ranks = children(process)
        assert len(ranks) == (1 if mesh == "tp2" else 0)
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            remaining = [line for line in lines if line]
        assert remaining[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in remaining[-2]
        assert process.wait(timeout=30) == 128 + number
        assert not any(map(is_there, ranks))
        assert "Traceback" not in process.stderr.read()


@pytest.mark.full("processes that load torch")
@pytest.mark.parametrize("keys", [(), ("api_keys=[secret]",)], ids=["without keys", "with a key"])
def test_pages_of_other_names(folder, keys):
    """At this machine alone they are refused, but for a name that was given; not where the server asks for a key."""
    with serving(folder, "host_names=[chat.example.org]", *keys) as (_, address):
        for name, status in (("elsewhere.org", 200 if keys else 403), ("chat.example.org", 200)):
            headers = {"Host": name, "Origin": f"http://{name}", "Authorization": "Bearer secret"}
            assert httpx.post(f"{address}/tokenize", json={"prompt": "a"}, headers=headers).status_code == status


def test_answers_on_one_connection_do_not_wait():
    """What the kernel would hold back until the client acknowledges what came before, for 40 ms, is sent at once."""
    with (
        _listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.full("processes that load torch")
def test_adapters_on_two_ranks(folder, adapter_folders):
    """Two ranks answer each model of a mixed batch, and score prompts, as one process does with the adapter merged."""
    folders, merged = adapter_folders
    with serving(folder, "mesh=tp2", "name=base", chosen(folders)) as (_, address), ThreadPoolExecutor(6) as pool:

        def ask(name):
            body = {"model": name, "prompt": "hello", "max_tokens": 9, "echo": True, "logprobs": 1, "temperature": 0}
            (choice,) = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"]
            return choice["text"], choice["logprobs"]["token_logprobs"][1:5]

        found = dict(zip(["base", *folders] * 2, pool.map(ask, ["base", *folders] * 2), strict=True))
    for name, (text, scores) in found.items():
        _, assistant = load_assistant(merged.get(name, folder))
        answer = assistant.continue_text("hello", Sampling(max_tokens=9))
        list(assistant.run())
        assert text == "hello" + answer.text
        expected = [chosen.logprob for chosen in assistant.score(list(b"hello"))[1:]]
        assert scores == pytest.approx(expected, abs=1e-5)
        assistant.tokenizer.close()
    assert len({text for text, _ in found.values()}) == 3


@pytest.mark.full("processes that load torch")
@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_dies_ends_all_requests(folder, busy):
    """Within ten seconds a stream ends with an error, the server with exit code 1 and a sentence on the rank; also when idle."""
    with serving(folder, "mesh=tp2") as (process, address):
        (rank,) = children(process)
        body = {"prompt": "abc", "max_tokens": 120, "stream": True, "ignore_eos": True}
        if busy:
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(rank, signal.SIGKILL)
                began = time.monotonic()
                remaining = [line for line in lines if line]
            assert '"error"' in remaining[-2] and "the engine has stopped: rank 1 was killed by SIGKILL" in remaining[-2]
        else:
            os.kill(rank, signal.SIGKILL)
            began = time.monotonic()
        assert process.wait(timeout=30) == 1
        assert time.monotonic() - began < 10
        said = process.stderr.read()
        assert "rank 1 was killed by SIGKILL" in said and "Traceback" not in said


def test_a_port_in_use_is_refused(capsys, folder):
    """With the address, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", f"path={folder}", f"port={port}"]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [(["dtype=int8"], "dtype=int8"), (["port=70000"], "at most 65535"), (["path=/nowhere"], "cannot serve /nowhere")],
)
def test_keys_that_do_not_fit_are_refused(capsys, folder, keys, message):
    """Before a model is loaded."""
    assert main(["serve", f"path={folder}", *keys]) != 0
    assert message in capsys.readouterr().err
