"""A server of a tiny model in this process, asked over the network of this machine."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from mpar import models
from mpar.cpp import prepare_kernels
from mpar.data import byte_tokenizer
from mpar.infer import Assistant, RowRunner, Sampling, Sizes
from mpar.serve import ServeOptions, Server, Worker, make_app
from tests.infer.test_assistant import CONFIG

SIZES = Sizes(rows=4, tokens=64, pages=129, page_size=16, length=256)


@contextmanager
def serving(
    runner, *, max_waiting: int = 64, api_keys: tuple[str, ...] = (), host_names: tuple[str, ...] = (), drain_s: int = 5
) -> Iterator[tuple[str, Worker]]:
    """The address of a server with this runner, and its worker."""
    worker = Worker(Assistant(runner, byte_tokenizer()), max_waiting)
    options = ServeOptions(model="tiny", sampling=Sampling(), api_keys=api_keys, host_names=host_names)
    app = make_app(worker, options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(app, worker, drain_s)
    worker.on_failure = lambda: None  # the server goes on, so that tests can ask it
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", worker
    finally:
        server.should_exit = True
        thread.join()
        worker.join()
        listener.close()
        worker.assistant.tokenizer.close()


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Clients do not wait until kernels are compiled."""
    prepare_kernels(lambda what: nullcontext())


@pytest.fixture(scope="session")
def tiny_runner() -> RowRunner:
    """A tiny model with fresh parameters."""
    model = models.build("qwen3", CONFIG)
    return RowRunner(model, model.init(0), SIZES)


@pytest.fixture(scope="module")
def server(tiny_runner) -> Iterator[tuple[str, Worker]]:
    """The address of a server of the tiny model, and its worker."""
    with serving(tiny_runner) as address_and_worker:
        yield address_and_worker
