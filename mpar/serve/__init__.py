"""Serve: a model behind OpenAI's HTTP interface, and a page to talk to it."""

from mpar.serve._app import ServeOptions, make_app
from mpar.serve._server import Server
from mpar.serve._worker import Worker

__all__ = ["ServeOptions", "Server", "Worker", "make_app"]
