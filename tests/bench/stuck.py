"""Processes that measure nothing: one does not answer, one ends, one answers."""

import os
import time
from multiprocessing.connection import Connection

__all__ = ["answers", "ends", "hangs", "sticks"]


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
        connection.send({"status": "ok", "pid": os.getpid()})


def sticks(connection: Connection, device: str) -> None:
    """As a process does whose GPU has seen an illegal access."""
    while True:
        connection.recv()
        connection.send(
            {"status": "failed", "error": "AcceleratorError: CUDA error: an illegal memory access", "pid": os.getpid()}
        )
