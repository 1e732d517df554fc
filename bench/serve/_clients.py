"""Clients of a server under load: each asks, reads the stream, and asks again; some leave in the middle of an answer."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

__all__ = ["Asked", "Load", "answer_alone", "under_load"]

MALFORMED = (
    {"prompt": 3},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "max_tokens": 0},
    {"prompt": [10**6]},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "model": "other"},
    {"prompt": "a", "stop": [3]},
    {"prompt": "x" * 9000},
)


@dataclass
class Asked:
    """A request and what came for it. leaves_after: the client goes after so many tokens; None: it stays."""

    prompt: list[int]
    max_tokens: int
    seed: int
    leaves_after: int | None
    tokens: list[str] = field(default_factory=list)
    finish: str | None = None
    failure: str = ""

    @property
    def body(self) -> dict[str, object]:
        """The body of the request, which asks for the tokens themselves."""
        how = {"temperature": 0.8, "ignore_eos": True, "logprobs": 0, "stream": True}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed, **how}


@dataclass
class Load:
    """What was measured. gaps_s: times between chunks of an answer with tokens, at the client; first_s: to the first chunk."""

    asked: list[Asked] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    not_refused: list[str] = field(default_factory=list)


async def under_load(address: str, num_clients: int, duration_s: float, num_malformed: int, seed: int) -> Load:
    """Let clients ask for so long; meanwhile another one sends malformed requests, which the server must refuse."""
    load, end = Load(), time.monotonic() + duration_s
    limits = httpx.Limits(max_connections=num_clients + 8, max_keepalive_connections=num_clients + 8)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits, trust_env=False) as client:
        clients = [_client(client, load, end, random.Random(seed * 1000 + number)) for number in range(num_clients)]
        await asyncio.gather(*clients, _refused(client, load, num_malformed, duration_s / max(1, num_malformed)))
    return load


async def answer_alone(address: str, asked: Asked) -> list[str]:
    """The tokens that the same request gets when nobody else asks."""
    again = Asked(asked.prompt, asked.max_tokens, asked.seed, None)
    async with httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as client:
        await _ask(client, Load(), again)
    return again.tokens


async def _client(client: httpx.AsyncClient, load: Load, end: float, draw: random.Random) -> None:
    """Ask until the time is over: prompts of 16 to 512 tokens, a tenth of which are given up."""
    while time.monotonic() < end:
        prompt = [draw.randrange(256) for _ in range(draw.randint(16, 512))]
        max_tokens = draw.randint(16, 128)
        leaves = draw.randint(1, max_tokens - 1) if draw.random() < 0.1 else None
        asked = Asked(prompt, max_tokens, draw.randrange(2**31), leaves)
        load.asked.append(asked)
        try:
            await _ask(client, load, asked)
        except httpx.HTTPError as error:
            asked.failure = f"{type(error).__name__}: {error}"


async def _ask(client: httpx.AsyncClient, load: Load, asked: Asked) -> None:
    """Read the stream of one request."""
    last, is_first = time.perf_counter(), True
    async with client.stream("POST", "/v1/completions", json=asked.body) as response:
        if response.status_code != 200:
            asked.failure = f"{response.status_code}: {(await response.aread()).decode()}"
            return
        async for line in response.aiter_lines():
            if line in ("", "data: [DONE]"):
                continue
            now, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
            if "error" in event:
                asked.failure = str(event["error"])
                return
            (choice,) = event["choices"]
            asked.finish = choice["finish_reason"] or asked.finish
            if choice["logprobs"] and choice["logprobs"]["tokens"]:
                asked.tokens += choice["logprobs"]["tokens"]
                (load.first_s if is_first else load.gaps_s).append(now - last)
                last, is_first = now, False
            if asked.leaves_after is not None and len(asked.tokens) >= asked.leaves_after:
                return


async def _refused(client: httpx.AsyncClient, load: Load, count: int, pause_s: float) -> None:
    """Send malformed requests, one after the other; notes those that are not refused as OpenAI would."""
    for number in range(count):
        body = MALFORMED[number % len(MALFORMED)]
        response = await client.post("/v1/completions", json=body)
        error = response.json().get("error", {}) if 400 <= response.status_code < 500 else {}
        if {"message", "type", "param", "code"} <= set(error):
            load.num_refused += 1
        else:
            load.not_refused.append(f"{response.status_code} for {str(body)[:60]}")
        await asyncio.sleep(pause_s)
