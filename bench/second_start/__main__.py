"""`python -m bench.second_start`: runs of the README in turn, each pair with a folder of programs that is empty at first.

With `--answers` each run is `mpar generate` of the tiny model of `bench.decode`, from the command to the end of one answer.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench._machine import this_run
from bench._result import RESULTS, Result, append_results
from bench.decode._case import SHAPES
from mpar import models
from mpar.data import byte_tokenizer

_LOOK_S = 0.01


def cpu_seconds(root: int) -> float:
    """CPU seconds of the process `root`, of those that it has started, and of theirs."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    tree = {root}
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def start(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, float]:
    """Run `mpar train` until its first step is recorded: seconds until the ranks were started and until then, and CPU seconds.

    Raises RuntimeError with what the run printed if it has no first step.
    """
    metrics, printed = folder / name / "metrics.jsonl", folder / f"{name}.txt"
    folders = [f"run_dir={folder / name}", f"compile_cache={folder / 'programs'}"]
    words = [sys.executable, "-m", "mpar", "train", *folders, *overrides]
    prepared_s = None
    with printed.open("wb") as out:
        began = time.perf_counter()
        with subprocess.Popen(words, stdout=out, stderr=out) as process:
            while not (metrics.is_file() and metrics.stat().st_size):
                if prepared_s is None and b"prepared in" in printed.read_bytes():
                    prepared_s = time.perf_counter() - began
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(words)} has no first step:\n{printed.read_text()}")
                time.sleep(_LOOK_S)
            first_step_s, cpu_s = time.perf_counter() - began, cpu_seconds(process.pid)
            process.terminate()
    found = re.search(r"prepared in ([\d.]+) s", printed.read_text())
    assert found is not None
    started_s = prepared_s or first_step_s
    return {"ranks_started_s": started_s, "prepare_s": float(found[1]), "first_step_s": first_step_s, "cpu_s": cpu_s}


def answer(folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Run `mpar generate`, which keeps all that it keeps in `folder`: seconds and CPU seconds until it has ended.

    Raises RuntimeError with what it printed if it fails.
    """
    words = [sys.executable, "-m", "mpar", "generate", f"path={folder / 'model'}", "prompt=Who are you?", "max_new_tokens=16"]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(folder)
    printed = folder / "printed.txt"
    with printed.open("wb") as out:
        began = time.perf_counter()
        process = subprocess.Popen([*words, *overrides], stdout=out, stderr=out, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        ended_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{printed.read_text()}")
    return {"ended_s": ended_s, "cpu_s": used.ru_utime + used.ru_stime}


def pairs_of_answers(passes: int, overrides: Sequence[str]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The first and the second run of each pass, of a model with random weights."""
    model = models.build("llama", {**SHAPES["tiny"].config, "rope_theta": 10_000.0})
    params, firsts, seconds = model.init(0), [], []
    for _ in range(passes):
        with tempfile.TemporaryDirectory() as folder:
            models.to_hf(model, params, Path(folder, "model"))
            byte_tokenizer().save(Path(folder, "model"))
            firsts.append(answer(Path(folder), overrides))
            seconds.append(answer(Path(folder), overrides))
    return firsts, seconds


def pairs_of_runs(passes: int, overrides: Sequence[str]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The first and the second run of each pass."""
    firsts, seconds = [], []
    for _ in range(passes):
        with tempfile.TemporaryDirectory() as folder:
            firsts.append(start(Path(folder), "first", overrides))
            seconds.append(start(Path(folder), "second", overrides))
    return firsts, seconds


def main() -> int:
    """Measure, append one result and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.second_start")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "second_start.jsonl")
    parser.add_argument("--answers", action="store_true", help="measure mpar generate in place of mpar train")
    parser.add_argument("overrides", nargs="*", help="of the configuration, as for the command")
    args = parser.parse_args()
    firsts, seconds = (pairs_of_answers if args.answers else pairs_of_runs)(args.passes, args.overrides)
    figures = {
        f"{name}_{key}": round(statistics.median(line[key] for line in lines), 2)
        for name, lines in (("first", firsts), ("second", seconds))
        for key in firsts[0]
    }
    for name, key in (("ratio", "ended_s" if args.answers else "first_step_s"), ("cpu_ratio", "cpu_s")):
        ratios = [second[key] / first[key] for first, second in zip(firsts, seconds, strict=True)]
        figures[name] = round(statistics.median(ratios), 3)
    case = {"case": "generate"} if args.answers else {}
    result = Result.of({**case, "overrides": args.overrides, "passes": args.passes, **figures}, this_run())
    append_results(args.out, [result])
    sys.stdout.write(json.dumps({**result.case, **result.figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
