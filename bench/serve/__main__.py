"""`python -m bench.serve`: a server of a tiny model under the load of many streaming clients, and what these see of it.

Prints one result, and appends it to `bench/results/serve.jsonl`. Server and clients share the cores of the machine.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench._machine import foreign_cpu_s, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench.serve._clients import Load, answer_alone, under_load
from mpar import models
from mpar.data import byte_tokenizer

GAP_BAR, GROWTH_BAR_MB = 3.0, 20.0
CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 259, "initializer_range": 0.3}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SAMPLE_S = 1.0


class Memory(threading.Thread):
    """Looks how much memory a process has, once a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.file, self.megabytes, self.ended = Path(f"/proc/{pid}/status"), [], threading.Event()

    def run(self) -> None:
        """Note the resident memory until `ended`."""
        while not self.ended.wait(SAMPLE_S):
            line = next(line for line in self.file.read_text().splitlines() if line.startswith("VmRSS"))
            self.megabytes.append(int(line.split()[1]) / 1024)

    def growth_mb(self) -> float:
        """How much more there is in the last tenth of the time than in the third one."""
        tenth = max(1, len(self.megabytes) // 10)
        return statistics.median(self.megabytes[-tenth:]) - statistics.median(self.megabytes[2 * tenth : 3 * tenth])


def summarise(load: Load, growth_mb: float, num_compared: int, num_unlike: int, wall_s: float) -> dict[str, Json]:
    """The figures of a line."""
    stayed = [asked for asked in load.asked if asked.leaves_after is None]
    whole = [asked for asked in stayed if asked.finish == "length" and len(asked.tokens) == asked.max_tokens]
    gaps = sorted(load.gaps_s)
    median_s, late_s = statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))]
    return {
        "requests": len(load.asked),
        "left": len(load.asked) - len(stayed),
        "incomplete": len(stayed) - len(whole),
        "compared": num_compared,
        "unlike": num_unlike,
        "tokens_per_s": round(sum(len(asked.tokens) for asked in load.asked) / wall_s, 1),
        "first_median_s": round(statistics.median(load.first_s), 4),
        "gap_median_s": round(median_s, 5),
        "gap_p99_s": round(late_s, 5),
        "gap_ratio": round(late_s / median_s, 2),
        "gap_bar": GAP_BAR,
        "growth_mb": round(growth_mb, 1),
        "growth_bar_mb": GROWTH_BAR_MB,
        "malformed_refused": load.num_refused,
        "malformed_not_refused": len(load.not_refused),
    }


def measure(keys: Sequence[str], num_clients: int, duration_s: float, num_compared: int, seed: int) -> dict[str, Json]:
    """Start a server, load it, compare some answers with those to the same requests alone, and stop it."""
    with tempfile.TemporaryDirectory() as name:
        model = models.build("llama", CONFIG)
        models.to_hf(model, model.init(0), name)
        byte_tokenizer().save(name)
        command = [sys.executable, "-m", "mpar", "serve", f"path={name}", "port=0", *keys]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            address = _address(server)
            memory = Memory(server.pid)
            memory.start()
            began, foreign = time.monotonic(), foreign_cpu_s()
            try:
                load = asyncio.run(under_load(address, num_clients, duration_s, 200, seed))
                wall_s = time.monotonic() - began
                busy_cores = (foreign_cpu_s() - foreign) / wall_s
                memory.ended.set()
                stayed = [asked for asked in load.asked if asked.leaves_after is None]
                compared = random.Random(seed).sample(stayed, min(num_compared, len(stayed)))
                unlike = sum(asyncio.run(answer_alone(address, asked)) != asked.tokens for asked in compared)
            finally:
                memory.ended.set()
                _stop(server)
        for asked in load.asked:
            if asked.failure:
                print(asked.failure[:200], file=sys.stderr)
        figures = summarise(load, memory.growth_mb(), len(compared), unlike, wall_s)
        return {**figures, "wall_s": round(wall_s, 1), "busy_cores": round(busy_cores, 2)}


def _address(server: subprocess.Popen[str]) -> str:
    """Where a server listens, which it says when it does; before, it may say that kernels are compiled."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"http://127.0.0.1:\d+", line):
            return found[0]
    raise SystemExit("".join(said))


def _stop(server: subprocess.Popen[str]) -> None:
    """Ask a server to end; one that does not is killed, and it is an error."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=60)
    except subprocess.TimeoutExpired:
        server.kill()
        raise


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--compared", type=int, default=100, help="answers that are asked for again, alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "serve.jsonl")
    parser.add_argument("keys", nargs="*", help="keys of mpar serve, such as rows=64")
    arguments = parser.parse_args()
    keys = arguments.keys or [f"rows={arguments.clients}"]
    figures = measure(keys, arguments.clients, arguments.seconds, arguments.compared, arguments.seed)
    case: dict[str, Json] = {"bench": "serve", "config": "tiny llama", "options": " ".join(keys)}
    result = Result(case, {"clients": arguments.clients, **figures}, this_run())
    print(json.dumps(result.values(), indent=2))
    append_results(arguments.out, [result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
