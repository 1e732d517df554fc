"""Server: what listens. At its end answers that have begun come to theirs, or are told that no more comes."""

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

from mpar.serve._worker import Worker

__all__ = ["Server"]

_TELL_S = 5  # for clients to be told, after which what still runs is cut off


class Server(uvicorn.Server):
    """Serves an app until a signal comes, or the engine fails. drain_s: seconds for answers that have begun by then."""

    def __init__(self, app: Starlette, worker: Worker, drain_s: int) -> None:
        end_s = drain_s + _TELL_S
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=end_s, lifespan="on"))
        self._worker, self._drain_s = worker, drain_s
        worker.on_failure = lambda: setattr(self, "should_exit", True)
        self.should_exit = worker.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        why = f"the server stopped before this answer was complete (drain_s={self._drain_s})"
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._worker.give_up, why)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
