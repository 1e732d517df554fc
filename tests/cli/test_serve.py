"""`mpar serve` as a process: it says where it listens, lets answers come to their end when it is stopped, refuses bad keys."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from mpar.cli.main import main
from tests.cli.conftest import environment
from tests.cli.test_generate import folder

__all__ = ["folder"]


@pytest.mark.full("a process that loads torch")
def test_a_signal_lets_answers_come_to_their_end(folder):
    """SIGTERM in the middle of a stream: the stream ends as it would have, then the process, and no traceback is printed."""
    command = [sys.executable, "-m", "mpar", "serve", f"path={folder}", "port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        address = re.search(r"http://127.0.0.1:\d+", process.stderr.readline())[0]
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            remaining = [line for line in lines if line]
        assert remaining[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in remaining[-2]
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert "Traceback" not in process.stderr.read()


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
