"""All variants answer the same requests in turn: tokens per second, ratios with intervals, the distance to the floor."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bench._machine import foreign_cpu_s, this_run
from bench._result import Json, Result
from bench._statistics import interval_text, paired_ratio
from bench.decode._case import BARS, Shape, Workload
from bench.decode._variants import CEILING, OURS, Variants

__all__ = ["AnswersDiffer", "measure", "read_bytes_per_s", "table"]

Times = dict[str, dict[str, list[list[float]]]]
"""Seconds by variant, by clock, by pass, by turn."""
EQUAL = {torch.float32: 0.99, torch.bfloat16: 0.0}
"""What share of the tokens must be equal. In bfloat16 two programs round differently, and soon go on with different tokens."""


class AnswersDiffer(Exception):
    """Two variants gave different answers."""


def measure(
    config: str,
    shape: Shape,
    workloads: Mapping[str, Workload],
    names: Sequence[str],
    passes: int,
    say: Callable[[str], None] = lambda text: None,
    llama_cpp: Path | None = None,
) -> list[Result]:
    """One line for each workload and variant. say: is called with what is done now. llama_cpp: as `Variants` has it. Raises
    AnswersDiffer."""
    say(f"loading {', '.join(names)}")
    variants = Variants(shape, names, llama_cpp)
    results = []
    for case, workload in workloads.items():
        equal = _check(variants, workload, shape, names, lambda text, case=case: say(f"{case}: {text}"))  # type: ignore[misc]
        say(f"{case}: {passes} passes")
        times, foreign, bandwidth = _timed(variants, workload, names, passes)
        facts: dict[str, Json] = {"bench": "decode", "config": config, "case": case, "threads": torch.get_num_threads()}
        facts |= {"dtype": str(shape.dtype).removeprefix("torch."), "prompt": workload.prompt, "answers": list(workload.answers)}
        facts |= {"foreign_cores": foreign, "read_gb_per_s": round(bandwidth / 1e9, 2)}
        floor_s = variants.weight_bytes / bandwidth
        ours = min((name for name in names if name in OURS), key=lambda name: _median(times, name, "wall"))
        lines = [_line(name, ours, times, workload, floor_s) | {"equal_tokens": equal[name]} for name in names]
        results += [Result.of(line | facts | _bar(config, case, line, lines), this_run()) for line in lines]
    return results


def _check(
    variants: Variants, workload: Workload, shape: Shape, names: Sequence[str], say: Callable[[str], None]
) -> dict[str, float]:
    """Warm up. For each variant the share of tokens that the first one has too."""
    given = {}
    for name in names:
        start = time.perf_counter()
        for _ in range(2):
            given[name] = [token for row in variants.answers[name](workload) for token in row]
        say(f"{name} has answered twice, in {time.perf_counter() - start:.1f} s")
    first = given[names[0]]
    equal = {name: sum(a == b for a, b in zip(first, given[name], strict=True)) / len(first) for name in names}
    wrong = [f"  {name}: {share:.3f}" for name, share in equal.items() if share < EQUAL[shape.dtype] and name != CEILING]
    if wrong:
        raise AnswersDiffer("\n".join([f"too few tokens are those of {names[0]}:", *wrong]))
    return {name: round(share, 4) for name, share in equal.items()}


def _timed(variants: Variants, workload: Workload, names: Sequence[str], passes: int) -> tuple[Times, list[float], float]:
    """The times; by pass, how many cores others used; and the rate at which memory is read, the highest of all passes."""
    times: Times = {name: {"wall": [], "cpu": []} for name in names}
    foreign, bandwidth = [], 0.0
    for index in range(passes):
        start_s, own_s, all_s = time.monotonic(), time.process_time(), foreign_cpu_s()
        turn = index % len(names)
        for name in [*names[turn:], *names[:turn]]:
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            variants.answers[name](workload)
            times[name]["wall"].append([time.perf_counter() - wall])
            times[name]["cpu"].append([time.process_time() - cpu])
        bandwidth = max(bandwidth, read_bytes_per_s())
        others_s = foreign_cpu_s() - all_s - (time.process_time() - own_s)
        foreign.append(round(max(0.0, others_s / (time.monotonic() - start_s)), 2))
    return times, foreign, bandwidth


def read_bytes_per_s(size: int = 2**26) -> float:
    """How fast memory that no cache holds is read, with the threads that torch has."""
    x = torch.ones(size)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - start)
    return x.nbytes / best


def _median(times: Times, name: str, clock: str) -> float:
    return statistics.median(turn for turns in times[name][clock] for turn in turns)


def _line(name: str, ours: str, times: Times, workload: Workload, floor_s: float) -> dict[str, Json]:
    """ours: the fastest variant of mpar, with which those of transformers are compared."""
    useful = sum(workload.answers) if max(workload.answers) > 1 else workload.prompt * len(workload.answers)
    wall, cpu = (_median(times, name, clock) for clock in ("wall", "cpu"))
    fastest = min(turn for turns in times[name]["wall"] for turn in turns)
    line: dict[str, Json] = {
        "variant": name,
        "tokens_per_s": round(useful / wall, 2),
        "best_tokens_per_s": round(useful / fastest, 2),
    }
    clocks = ("wall",) if name == CEILING else ("wall", "cpu")  # that one computes in a process of its own
    if "cpu" in clocks:
        line["cpu_ms_per_token"] = round(1e3 * cpu / useful, 4)
    if len(workload.answers) == 1 and max(workload.answers) > 1:
        line["times_floor"] = round(wall / useful / floor_s, 2)
    if name not in OURS:
        for clock in clocks:
            line[f"mpar_speed_over_this_{clock}"] = paired_ratio(times[name][clock], times[ours][clock]).rounded()
    return line


def _bar(config: str, case: str, line: Mapping[str, Json], lines: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The bar, on the line of the fastest variant of transformers."""
    peers = [each for each in lines if each["variant"] not in (*OURS, CEILING)]
    if (config, case) not in BARS or not peers or line is not max(peers, key=lambda each: each["tokens_per_s"]):
        return {}
    return {"bar": BARS[config, case].ratio, "bar_tokens_per_s": BARS[config, case].tokens_per_s}


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each variant."""
    head = ("config, case", "threads", "variant", "tokens/s", "best", "CPU ms a token", "times the floor")
    head += ("mpar over this, wall (95 %)", "mpar over this, CPU", "bar", "equal tokens", "foreign cores")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in results:
        ratios = (f"mpar_speed_over_this_{clock}" for clock in ("wall", "cpu"))
        wall, cpu = (interval_text(result.numbers(key) if result.has(key) else None) for key in ratios)
        cpu_ms = f"{result.number('cpu_ms_per_token'):.2f}" if result.has("cpu_ms_per_token") else ""
        rows.append(
            f"| {result.text('config')}, {result.text('case')} | {result.case['threads']} | {result.text('variant')} "
            f"| {result.number('tokens_per_s'):.1f} | {result.number('best_tokens_per_s'):.1f} "
            f"| {cpu_ms} | {result.number('times_floor') if result.has('times_floor') else ''} "
            f"| {wall} | {cpu} | {result.number('bar') if result.has('bar') else ''} | {result.number('equal_tokens'):.2f} "
            f"| {'/'.join(f'{x:.1f}' for x in result.numbers('foreign_cores'))} |"
        )
    return "\n".join(rows) + "\n"
