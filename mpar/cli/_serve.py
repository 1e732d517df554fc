"""`mpar serve`: a model behind OpenAI's HTTP interface, and a page to talk to it."""

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpar.cli._answering import ChoiceKeys, answer_problems, answering
from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._generate import chosen_sampling
from mpar.cli._later import later
from mpar.cli._local_model import local_folder
from mpar.cli._model_folder import model_folder
from mpar.cli._screen import CompileNotes, say_aside
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError, MparError, ProgramError
from mpar.train import key

__all__ = ["ServeConfig", "main"]

_END_S = 10.0  # for the step, or the program, at which the engine is

_HELP = f"""usage: mpar serve path=RUN_OR_HF_FOLDER [port=8000] [key=value] ...
       mpar serve path=HF_FOLDER 'adapters={{french: FOLDER, sql: FOLDER}}'

Answers OpenAI's clients at http://HOST:PORT/v1, with a page to talk to the model at http://HOST:PORT/. Needs the extra `serve`:
pip install 'mpar[serve]'. SIGTERM and Ctrl-C let answers that have begun come to their end, for at most drain_s seconds. With
`adapters` a request names, as its model, the adapter that answers, or the model alone.

{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ChoiceKeys):
    """The keys of `mpar serve`."""

    path: str = key("an HF folder, or the run_dir of a run")
    host: str = key("the address to listen at; 127.0.0.1 is this machine alone, 0.0.0.0 every network", default="127.0.0.1")
    port: int = key("the port to listen at; 0: a free one", default=8000, at_least=0, at_most=65535)
    name: str | None = key("the name of the model for clients; null: that of its folder", default=None)
    api_keys: tuple[str, ...] = key("clients need one of these; also those in MPAR_API_KEY, split at commas", default=())
    host_names: tuple[str, ...] = key(
        "hosts besides localhost whose pages may ask a server without keys that listens to this machine alone", default=()
    )
    max_waiting: int = key("further requests are refused while so many answers wait", default=256, at_least=1)
    drain_s: int = key("at the end, seconds for answers that have begun", default=30, at_least=0)
    temperature: float | None = key(
        "unless a request says otherwise; null: as generation_config.json says", default=None, at_least=0
    )


def main(args: Sequence[str]) -> int:
    """Serve until a signal comes; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "serve", ServeConfig):
        return 0
    config, _ = compose_config("serve", ServeConfig, arguments.overrides, arguments.user_dir)
    problems = answer_problems(config)
    problems += [f"host_names={name}: give the name alone" for name in config.host_names if ":" in name or "/" in name]
    if problems:
        raise ConfigError(f"cannot serve with {'; '.join(problems)}.")
    folder = model_folder(Path(local_folder(config.path)), "serve")
    try:
        serve = later("mpar.serve")
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot serve: {error.name} is missing. Install it: pip install 'mpar[serve]'.") from None
    lost: list[Callable[[str], None]] = []
    notes = CompileNotes(shown=config.execution == "inductor")
    with (
        _listen(config.host, config.port) as listener,
        answering(config, folder, notes, lambda text: [tell(text) for tell in lost]) as (model, assistant),
    ):
        sampling = chosen_sampling(model, folder, later("mpar.infer").Sampling(), {"temperature": config.temperature})
        worker = serve.Worker(assistant, config.max_waiting)
        lost.append(lambda text: worker.fail(ProgramError(text)))
        name = config.name or (folder.parent if folder.name == "hf" else folder).resolve().name
        keys = [*config.api_keys, *(word for word in os.environ.get("MPAR_API_KEY", "").split(",") if word)]
        names = None if keys or not _is_this_machine_alone(listener) else [each.lower() for each in config.host_names]
        options = serve.ServeOptions(model=name, sampling=sampling, api_keys=keys, host_names=names)
        app = serve.make_app(worker, options)
        host, port = listener.getsockname()[:2]
        say_aside(f"{name}: http://{host}:{port}/ is the page, http://{host}:{port}/v1 the address for OpenAI's clients")
        server = serve.Server(app, worker, config.drain_s)
        try:
            server.run(sockets=[listener])
        finally:  # it raises the signal that has ended it, and a thread that compiles would abort the process at its end
            worker.join(timeout=_END_S)
        if isinstance(worker.failure, MparError):
            raise ProgramError(f"the server has stopped: {worker.failure}") from worker.failure
        if worker.failure is not None:
            raise worker.failure
    return 0 if server.started else 1


def _is_this_machine_alone(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError with the reason if that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the end of an answer waits 40 ms
        return listener
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen at {host}: {error.strerror}. Choose host=127.0.0.1 or host=0.0.0.0.") from None
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another port=, or port=0 for a free one."
        ) from None
