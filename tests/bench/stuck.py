"""Processes that measure nothing: they do not answer, end, answer, or begin to."""

import os
import time
from multiprocessing.connection import Connection

__all__ = ["answers", "ends", "hangs", "starts", "sticks"]


def hangs(connection: Connection, device: str) -> None:
    """As a kernel does that waits for what never comes."""
    connection.recv()
    time.sleep(600)


def ends(connection: Connection, device: str) -> None:
    """As a process does that the system kills."""
    connection.recv()
    os._exit(9)


def answers(connection: Connection, device: str) -> None:
    """Every question, with its process."""
    while True:
        connection.recv()
        connection.send((True, {"status": "ok", "pid": os.getpid()}))


def sticks(connection: Connection, device: str) -> None:
    """As a process does whose GPU has seen an illegal access."""
    words = "AcceleratorError: CUDA error: an illegal memory access"
    while True:
        connection.recv()
        connection.send((True, {"status": "failed", "error": words, "pid": os.getpid()}))


def starts(connection: Connection, device: str) -> None:
    """As a process does that times ours and then compiles a peer for ever."""
    connection.recv()
    connection.send((False, {"status": "ok", "variants": {"ours": {"ms": 1.0}}}))
    time.sleep(600)
