"""What one process measures of itself: `python -m bench.data._measured WHAT FOLDER NUMBER`. It prints a line of JSON."""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["main"]

_MIB = 2**20


def main() -> int:
    """Measure one thing. torch is loaded before, and only here, so that processes which tokenise do not load it."""
    what, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, in every process
    measure: Mapping[str, Callable[[Path, int], Mapping[str, object]]] = {
        "beside_encode": _beside_encode,
        "load": _load,
        "stream": _stream,
        "memory": _memory,
        "steps": _steps,
    }
    found = measure[what](folder, number)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def _timed(work: Callable[[], object]) -> dict[str, float]:
    began, began_cpu = time.perf_counter(), _cpu_s()
    work()
    return {"wall_s": time.perf_counter() - began, "cpu_s": _cpu_s() - began_cpu}


def _beside_encode(folder: Path, turns: int) -> dict[str, float]:
    """The library tokenizers alone, texts in memory, and in turn with it the file, read, tokenised and laid out in memory by the
    same library and by gigatoken. Others use the machine, too, so what counts are CPU seconds, turn by turn."""
    import tokenizers

    from mpar.data import DataConfig, Tokenizer, load_dataset

    name = str(folder / "corpus.jsonl")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in Path(name).read_text().splitlines()]
    faster, slower = (Tokenizer.from_folder(folder / "tokenizer") for _ in range(2))
    slower._fast = False  # as without gigatoken
    wanted = DataConfig(kind="pt", sources=(name,), batch_size=8, seq_len=1024)
    rates: dict[str, list[float]] = {"rate_of_encode_cpu": [], "with_gigatoken": [], "gigatoken_alone": []}
    for _ in range(turns):
        alone = _timed(lambda: backend.encode_batch_fast(texts, add_special_tokens=True))["cpu_s"]
        rates["rate_of_encode_cpu"].append(alone / _timed(lambda: load_dataset(wanted, slower))["cpu_s"])
        rates["with_gigatoken"].append(alone / _timed(lambda: load_dataset(wanted, faster))["cpu_s"])
        rates["gigatoken_alone"].append(alone / _timed(lambda: faster.encode_texts(texts))["cpu_s"])
    found = {name: statistics.median(values) for name, values in rates.items()}
    of_own = rates["rate_of_encode_cpu"]
    return {**found, "lowest": min(of_own), "highest": max(of_own)}


def _load(folder: Path, workers: int) -> dict[str, float]:
    """The file, read, tokenised and laid out in memory."""
    from mpar.data import DataConfig, Tokenizer, load_dataset

    tokenizer = Tokenizer.from_folder(folder / "tokenizer")
    wanted = DataConfig(kind="pt", sources=(str(folder / "corpus.jsonl"),), batch_size=8, seq_len=1024, workers=workers)
    return _timed(lambda: load_dataset(wanted, tokenizer))


def _stream(folder: Path, workers: int) -> dict[str, float]:
    """The file, read once as a stream, and every batch made."""
    from mpar.data import DataConfig, Tokenizer, load_dataset, stream_report

    num_rows = sum(1 for _ in (folder / "corpus.jsonl").open())
    tokenizer = Tokenizer.from_folder(folder / "tokenizer")
    wanted = DataConfig(
        kind="pt", sources=(str(folder / "corpus.jsonl"),), batch_size=8, seq_len=1024, workers=workers, stream=True,
        shuffle_rows=2000,
    )  # fmt: skip

    def read_once() -> None:
        batches, step = load_dataset(wanted, tokenizer), 0
        while not (cursor := batches.cursor(step)) or stream_report(cursor).num_rows < num_rows - wanted.shuffle_rows:
            batches.batch(step)
            step += 1
        batches.close()

    return _timed(read_once)


def _memory(folder: Path, num_rows: int) -> dict[str, float]:
    """The memory of this process and of the one beside it after ten thousand rows of a stream, and the most until `num_rows`."""
    from mpar.data import DataConfig, byte_tokenizer, load_dataset, stream_report

    wanted = DataConfig(
        kind="pt", sources=(str(folder / "short.jsonl"),), batch_size=64, seq_len=512, stream=True, shuffle_rows=2000
    )
    batches, step, early_mb, peak_mb = load_dataset(wanted, byte_tokenizer()), 0, 0.0, 0.0
    while (read := stream_report(batches.cursor(step)).num_rows) < num_rows:
        batches.batch(step)
        step += 1
        if step % 50 == 0:
            now_mb = _resident_mb()
            early_mb = max(early_mb, now_mb) if read <= 20_000 else early_mb
            peak_mb = max(peak_mb, now_mb)
    batches.close()
    return {"rows": read, "early_mb": early_mb, "peak_mb": peak_mb, "growth_mb": peak_mb - early_mb}


def _steps(folder: Path, count: int) -> Mapping[str, object]:
    """Steps with a stream beside the same ones from memory."""
    from bench.data._steps import measured_steps

    return measured_steps(folder, count)


def _resident_mb() -> float:
    """Memory of this process and its children that is not a mapping of a file."""
    own = os.getpid()
    children = [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    total = 0
    for pid in (own, *children):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return total / _MIB


if __name__ == "__main__":
    sys.exit(main())
