"""App: the routes of the server. Every handler checks, asks the worker, and turns what comes back into JSON or a stream."""

import asyncio
import contextlib
import difflib
import functools
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import mpar
from mpar.data import Tokenizer, conversation
from mpar.errors import ConfigError, MparError
from mpar.infer import Sampling
from mpar.serve._asked import Asked, read_chat, read_completion
from mpar.serve._metrics import metrics_text
from mpar.serve._objects import Reply
from mpar.serve._refusal import Refusal
from mpar.serve._worker import Job, Worker

__all__ = ["ServeOptions", "make_app"]

_MAX_BODY_BYTES = 2**26
_LEFT = 499  # nginx: the client closed the request


@dataclass(frozen=True)
class ServeOptions:
    """model: the name under which the model is offered; its adapters are offered under their own names.
    api_keys: one of them must come with a request, if there are any.
    host_names: a page must be of a host with an address in place of a name, of localhost, or of one of these; None: of any.
    sampling: how tokens are chosen unless a request says otherwise.
    """

    model: str
    sampling: Sampling
    api_keys: Sequence[str] = ()
    host_names: Sequence[str] | None = None


def make_app(worker: Worker, options: ServeOptions) -> Starlette:
    """The application; it starts the worker and stops it at its end. Raises ConfigError if an adapter has the model's name."""
    if options.model in worker.assistant.engine.runner.adapters:
        raise ConfigError(
            f"cannot offer an adapter under the name of the model, {options.model!r}: requests name the one or the other.\n"
            "Rename the adapter, or give the model another name=."
        )
    server = _Server(worker, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.one_model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {Refusal: _refuse, ClientDisconnect: _left, 404: _no_route, 405: _no_route, Exception: _fail}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.add_middleware(_OnlyWithKey, api_keys=options.api_keys)
    app.add_middleware(_OnlyOwnPages, host_names=options.host_names)
    return app


class _Json(JSONResponse):
    """JSON in ASCII, in which halves of surrogate pairs of a request can be said, too."""

    def render(self, content: object) -> bytes:
        """See `JSONResponse`."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _Json(error.body, error.status, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=_LEFT)  # nobody reads it


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _Json(Refusal(status, f"there is no {request.method} {request.url.path} here").body, status)


async def _fail(request: Request, error: Exception) -> Response:
    return _Json(Refusal(500, f"{type(error).__name__}: {error}").body, 500)


class _OnlyWithKey:
    """Lets requests to /v1 pass that come with one of the keys. (A BaseHTTPMiddleware would hide that clients leave.)"""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self.app, self._keys = app, [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"].startswith(("/v1", "/tokenize", "/detokenize")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any([hmac.compare_digest(given, b"Bearer " + key) for key in self._keys]):  # a list: all of them are compared
                refusal = Refusal(401, "the request needs one of the server's keys: Authorization: Bearer KEY")
                await _Json(refusal.body, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _OnlyOwnPages:
    """Refuses what a page of another site asks a visitor's browser to send: it could not read the answer, but make work. It could
    read it too if its own name were made to lead to this machine (DNS rebinding), which `host_names` is for."""

    def __init__(self, app: ASGIApp, host_names: Sequence[str] | None) -> None:
        self.app, self.host_names = app, host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        if scope["type"] == "http" and origin:
            refusal = self._refusal(origin, host)
            if refusal is not None:
                await _Json(refusal.body, 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, origin: str, host: str) -> Refusal | None:
        if origin.partition("://")[2] != host:
            return Refusal(
                403, f"a page of {origin} asks the server {host}: a proxy between them must pass the header Host as it comes"
            )
        if self.host_names is None or _is_local_name(host) or _name_of(host) in self.host_names:
            return None
        return Refusal(
            403,
            f"a page of {origin} asks a server that serves this machine alone: name its host in host_names= of mpar serve, "
            "or have the server ask for a key",
        )


def _name_of(host: str) -> str:
    """The name or the address, without the port, in the header Host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_local_name(host: str) -> bool:
    """Whether it is localhost or an address, which leads nowhere else than it says."""
    name = _name_of(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


class _Server:
    """The handlers of all routes."""

    def __init__(self, worker: Worker, options: ServeOptions) -> None:
        self.worker, self.options = worker, options
        self.tokenizer: Tokenizer = worker.assistant.tokenizer
        self._renders = ThreadPoolExecutor(1)  # the template's process answers the thread that started it, one question at a time
        self._began = int(time.time())

    async def page(self, request: Request) -> Response:
        """The page to talk to the model."""
        page = resources.files("mpar.serve").joinpath("chat.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def health(self, request: Request) -> Response:
        """200 while the engine runs, 503 after it has failed."""
        self.worker.check_runs()
        return Response()

    async def version(self, request: Request) -> Response:
        """The version of mpar."""
        return _Json({"version": mpar.__version__})

    async def metrics(self, request: Request) -> Response:
        """Counts in the text format of Prometheus."""
        return PlainTextResponse(metrics_text(self.worker, self.options.model), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The model, and its adapters as further models, of which it is the parent."""
        return _Json({"object": "list", "data": [self._model(adapter) for adapter in (None, *self._adapters)]})

    async def one_model(self, request: Request) -> Response:
        """The model of this name."""
        return _Json(self._model(self._adapter(request.path_params["model"])))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        body = await _body(request)
        fields = body if isinstance(body, dict) else {}
        if isinstance(fields.get("messages"), list):
            tokens = await self._render(read_chat(body, self.options.sampling))
        elif isinstance(fields.get("prompt"), str):
            special = bool(fields.get("add_special_tokens", True))
            tokens = await asyncio.to_thread(lambda: self._encode(fields["prompt"], special=special))
        else:
            raise Refusal(400, "the body needs a text `prompt` or `messages`", "prompt")
        return _Json({"tokens": tokens, "count": len(tokens), "max_model_len": self._length})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await _body(request)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Refusal(400, "the body needs `tokens`, a list of whole numbers", "tokens")
        return _Json({"prompt": _own_errors(lambda: self.tokenizer.decode(tokens))})

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        asked = read_chat(await _body(request), self.options.sampling)
        adapter = self._adapter(asked.model)
        tokens = await self._render(asked)
        thinks = self.tokenizer.decode(tokens[-8:]).rstrip().endswith("<think>")
        return await self._answer(request, asked, adapter, [tokens], chat=True, thinks=thinks)

    async def complete(self, request: Request) -> Response:
        """Texts that go on from prompts."""
        asked = read_completion(await _body(request), self.options.sampling)
        adapter = self._adapter(asked.model)
        prompts = [await asyncio.to_thread(self._tokens, prompt) for prompt in asked.prompts]
        return await self._answer(request, asked, adapter, prompts, chat=False)

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        adapter: str | None,
        prompts: Sequence[Sequence[int]],
        *,
        chat: bool,
        thinks: bool = False,
    ) -> Response:
        size = self.worker.assistant.vocab_size
        for name, tokens in {"logit_bias": asked.sampling.bias, "stop_token_ids": asked.sampling.stop_ids}.items():
            if max((*tokens, -1)) >= size:
                raise Refusal(400, f"{name} has a token that is not below {size}", name)
        if asked.sampling.schema is not None:
            await asyncio.to_thread(self._check_schema, asked.sampling.schema)
        scores = asked.echo and asked.sampling.num_alternatives is not None
        loop = asyncio.get_running_loop()
        job = Job(prompts, asked.sampling, asked.num_choices, scores, loop, adapter=adapter, only_prompts=asked.only_prompts)
        self.worker.submit(job)
        reply = Reply(asked, job, adapter or self.options.model, self.tokenizer, chat=chat, thinks=thinks)
        if asked.streams:
            return _Stream(reply, job, self.worker)
        gone = _told_of_leaving(request, job)
        try:
            while not reply.is_complete:
                grown = await job.events.get()
                if grown is None:
                    return Response(status_code=_LEFT)
                if grown.error is not None:
                    raise Refusal(grown.status, grown.error)
                reply.take(grown)
        finally:
            gone.cancel()
            if not reply.is_complete:
                self.worker.cancel(job)
        return _Json(reply.complete())

    def _check_schema(self, schema: str) -> None:
        try:
            self.worker.assistant.check_schema(schema)
        except MparError as error:
            raise Refusal(400, str(error), "response_format") from None

    async def _render(self, asked: Asked) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins."""
        template = self.tokenizer.template
        _own_errors(lambda: conversation(asked.messages), "messages")
        field = "chat_template_kwargs" if asked.template_variables else "messages"
        field = "tools" if asked.tools and template is not None and not template.reads_tools else field
        render = functools.partial(self.worker.assistant.render, asked.messages, asked.tools, asked.template_variables)
        return await asyncio.get_running_loop().run_in_executor(self._renders, _own_errors, render, field)

    def _tokens(self, prompt: str | Sequence[int] | None) -> Sequence[int]:
        """The tokens of a prompt; an empty text is the token that begins a text."""
        if isinstance(prompt, str):
            first = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
            return self._encode(prompt) or ([] if first is None else [first])
        size = self.worker.assistant.vocab_size
        outside = [token for token in prompt or () if not 0 <= token < size]
        if outside:
            raise Refusal(400, f"prompt has the tokens {outside[:4]}, and the model has {size}", "prompt")
        return list(prompt or ())

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        return _own_errors(lambda: self.tokenizer.encode(text, add_special_tokens=special))

    @property
    def _length(self) -> int:
        return self.worker.assistant.engine.runner.sizes.length

    @property
    def _adapters(self) -> Sequence[str]:
        return self.worker.assistant.engine.runner.adapters

    def _model(self, adapter: str | None) -> dict[str, object]:
        """OpenAI's object of an adapter, whose `parent` is the model, or of the model alone."""
        about = {"id": adapter or self.options.model, "object": "model", "created": self._began, "owned_by": "mpar"}
        return {**about, "max_model_len": self._length, "parent": self.options.model if adapter else None}

    def _adapter(self, name: str | None) -> str | None:
        """The adapter that a request asks for as its model; None: the model alone. Refuses a name that is neither."""
        if name is None or name == self.options.model:
            return None
        if name not in self._adapters:
            known = [self.options.model, *self._adapters]
            near = ", ".join(f"`{one}`" for one in difflib.get_close_matches(name, known, n=3, cutoff=0.0))
            there_are = f"There is {near}." if len(known) == 1 else f"The nearest of {len(known)} are {near}."
            raise Refusal(404, f"The model `{name}` does not exist. {there_are}", "model")
        return name


async def _body(request: Request) -> object:
    """The JSON value in the body."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MAX_BODY_BYTES:
            raise Refusal(413, f"the body has more than {_MAX_BODY_BYTES:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None


def _own_errors(work: Callable[[], Any], param: str | None = None) -> Any:
    """What `work` returns; what mpar refuses in it is the client's mistake, in the field `param`."""
    try:
        return work()
    except Refusal:
        raise
    except MparError as error:
        raise Refusal(400, str(error), param) from None


def _told_of_leaving(request: Request, job: Job) -> asyncio.Task[None]:
    """A task that waits until the client has left, and then tells so in the events of the job."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.events.put_nowait(None)

    return asyncio.create_task(wait())


class _Stream(Response):
    """The chunks of a reply as server-sent events. The job is given up as soon as the client leaves, or cannot be reached."""

    def __init__(self, reply: Reply, job: Job, worker: Worker) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        self.reply, self.job, self.worker = reply, job, worker
        del self.headers["content-length"]  # it has no end that is known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = _told_of_leaving(Request(scope, receive), self.job)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not self.reply.is_complete:
                grown = await self.job.events.get()
                if grown is None:
                    return
                if grown.error is not None:
                    await self._send(send, Refusal(grown.status, grown.error).body)
                    break
                for chunk in self.reply.take(grown):
                    await self._send(send, chunk)
            if self.reply.is_complete and self.reply.asked.with_usage:
                await self._send(send, self.reply.usage_chunk())
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        finally:
            gone.cancel()
            if not self.reply.is_complete:
                self.worker.cancel(self.job)

    async def _send(self, send: Send, value: object) -> None:
        text = json.dumps(value, separators=(",", ":"))  # ASCII: some clients split lines at U+0085 or U+2028, too
        await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
