"""Tune: other blocks, warps and stages for one kernel are compiled, held to the bars, checked, and then timed on a GPU."""

import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from bench import _timing
from mpar.errors import KernelError
from mpar.kernels import implementation, kernels_for
from mpar.kernels.offline import TABLE, Tuning, replaced, tuning
from mpar.testing import TOLERANCES, relative_error
from tools.kernel_gate import Case, all_cases, calling, compiled_facts, entry_names, failures, launch_table, record

__all__ = ["candidates", "rewritten", "tune"]

FACTORS = (0.5, 1, 2)
WARPS, STAGES, MOST_STAGES = (4, 8, 16), (-1, 0, 1), 5
SMALLEST_BLOCK = 16


def candidates(entry: Tuning) -> Iterator[Tuning]:
    """`entry`, then blocks halved, kept, doubled, with each number of warps; stages one less or more if there are several."""
    yield entry
    blocks = [
        [value] if value < SMALLEST_BLOCK else [int(value * factor) for factor in FACTORS] for value in entry.blocks.values()
    ]
    stages = [1] if entry.num_stages == 1 else [n for n in (entry.num_stages + d for d in STAGES) if 1 < n <= MOST_STAGES]
    for *values, num_warps, num_stages in itertools.product(*blocks, WARPS, stages):
        other = Tuning(dict(zip(entry.blocks, values, strict=True)), num_warps, num_stages)
        if (dict(entry.blocks), entry.num_warps, entry.num_stages) != (other.blocks, num_warps, num_stages):
            yield other


def rewritten(text: str, kernel: str, key: str, entry: Tuning) -> str:
    """The text of `table.yaml` with a new line for `key` of `kernel`, below the kernel's name if it had none; comments stay."""
    fields = {**entry.blocks, "num_warps": entry.num_warps, **({"num_stages": entry.num_stages} if entry.num_stages > 1 else {})}
    values = "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"
    lines = text.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if re.match(rf"{re.escape(kernel)}:", line))
    for i in range(start + 1, len(lines)):
        if not lines[i].startswith((" ", "#", "\n")):
            break
        if re.match(rf"  {re.escape(key)}: ", lines[i]):
            lines[i] = re.sub(r"\{.*?\}", values, lines[i], count=1)
            return "".join(lines)
    return "".join([*lines[: start + 1], f"  {key}: {values}\n", *lines[start + 1 :]])


def tune(kernel: str, *, only: str, write: bool, table: Path = TABLE) -> int:
    """Rank the candidates of each entry of `kernel` that a case launches on this GPU. Returns 1 if no case does."""
    arch = kernels_for("auto", "cuda").arch
    assert arch is not None
    wanted = [
        case for case in all_cases() if kernel in case.kernels and only in case.name and (not case.archs or arch in case.archs)
    ]
    done: set[str | None] = set()
    for case in sorted(wanted, key=lambda case: len(case.kernels)):
        for size in _sizes(case, kernel, arch) - done:
            done.add(size)
            ranking = _rank(case, kernel, arch, size, "cuda")
            key = arch if size is None else f"{arch} {size}"
            best_ms, best = ranking[0]
            if write and best is not tuning(kernel, arch, size):
                table.write_text(rewritten(table.read_text(encoding="utf-8"), kernel, key, best), encoding="utf-8")
                sys.stdout.write(f"{kernel} {key}: {_words(best)} is in the table now ({best_ms:.4g} ms)\n")
    return 0 if done else 1


def _rank(case: Case, kernel: str, arch: str, size: str | None, device: str) -> list[tuple[float, Tuning]]:
    entry, key = tuning(kernel, arch, size), arch if size is None else f"{arch} {size}"
    sys.stdout.write(f"{kernel} {key}, {case.name}\n")
    calls = _calls(case, device)
    expected, ranking = calls(), []
    for candidate in candidates(entry):
        with replaced(kernel, key, candidate):
            problem = _problem(case, arch) or _difference(calls, expected)
            if problem:
                sys.stdout.write(f"  {_words(candidate)}: {problem}\n")
                continue
            times = _timing.time_in_turn({"": calls}, share=0.25)[""].rounds
        ranking.append((statistics.median(time for round_ in times for time in round_), candidate))
        sys.stdout.write(f"  {_words(candidate)}: {ranking[-1][0]:.4g} ms\n")
        sys.stdout.flush()
    ranking.sort(key=lambda pair: pair[0])
    sys.stdout.writelines(
        f"  {place}. {ms:.4g} ms {_words(candidate)}\n" for place, (ms, candidate) in enumerate(ranking[:5], start=1)
    )
    return ranking


def _problem(case: Case, arch: str) -> str:
    """Why a candidate may not be used, by what the compiler says; "" if it may."""
    try:
        found = [
            message for unit in record(case, arch) for message in failures(compiled_facts(unit), case, arch, triton.__version__)
        ]
    except Exception as error:  # raised by the compiler or the function that launches: the candidate is rejected
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    return "; ".join(found)


def _difference(calls: Callable[[], list[Tensor]], expected: list[Tensor]) -> str:
    """How the results differ from those of the table's entry; "" if they do not."""
    try:
        results = calls()
    except (RuntimeError, KernelError) as error:
        return f"{type(error).__name__}: {error}"
    for actual, reference in zip(results, expected, strict=True):
        bound = TOLERANCES.get(actual.dtype, 0.0)
        if not relative_error(actual, reference) <= bound:
            return f"differs by {relative_error(actual, reference):.1e} from what the table's entry gives"
    return ""


def _sizes(case: Case, kernel: str, arch: str) -> set[str | None]:
    table = launch_table(arch)
    return {size for name, size in entry_names(record(case, arch), table) if name == kernel}


def _calls(case: Case, device: str) -> Callable[[], list[Tensor]]:
    """A function that repeats the calls of a case, on operands that are made only once."""
    generator = torch.Generator(device).manual_seed(20260101)
    made: list[Tensor] = []

    def make(shape: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        wide = torch.float32 if dtype.itemsize < 2 or not dtype.is_floating_point else dtype
        made.append(torch.empty(tuple(shape), dtype=wide, device=device).normal_(generator=generator).to(dtype))
        return made[-1]

    kept: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []

    def keep(primitive: str, name: str = "triton") -> Callable[..., Any]:
        def call(*operands: Any, **params: Any) -> Any:
            kept.append((implementation(primitive, name), operands, params))
            return implementation(primitive, name)(*operands, **params)

        return call

    with calling(keep):
        case.run(make)
    return lambda: [x for run, operands, params in kept for x in _tensors(run(*operands, **params))]


def _tensors(results: Any) -> list[Tensor]:
    return [x for result in results for x in _tensors(result)] if isinstance(results, (list, tuple)) else [results]


def _words(entry: Tuning) -> str:
    blocks = " ".join(f"{name} {value}" for name, value in entry.blocks.items())
    return f"{blocks}, {entry.num_warps} warps, {entry.num_stages} stages"
