"""`python -m bench.cpp`: mpar's C++ kernels for a CPU beside the ops of torch that run where there are none.

Both compute the same results of the same operands, one call each in turn; the results must agree, to 1e-5 in float32. Calls are
those of a layer of `tiny` (256 features, 8 heads of 32) and of its loss: training on 4 rows of 256 tokens, and a step of decode
with some tokens behind 100 others.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from bench._machine import this_run
from bench._result import RESULTS, Result, append_results
from bench._statistics import interval_text, paired_ratio
from mpar.ops import (
    MAX_SCREENED_ROWS,
    PRIMITIVES,
    Screen,
    _einsum,
    _largest_logits,
    _product,
    _rows,
    fill_screen,
    largest_logits,
    lay_by_columns,
    matmul_is_faster,
    screens_logits,
)
from mpar.ops.sequence import _few_tokens, _flash
from mpar.testing import relative_error
from mpar.torch_private import onednn_has_bfloat16

__all__ = ["cases", "main", "measure"]

Call = Callable[[], Sequence[Tensor]]
HEADS, KV_HEADS, SIZE, PAGE, BEFORE = 8, 4, 32, 16, 100
KERNELS = [
    *((_rows, "cpp_function"), (_flash, "cpp_function"), (_few_tokens, "_plan")),
    *((_product, "matmul"), (_product, "few_rows"), (_einsum, "matmul"), (_largest_logits, "_plan")),
]
"""The functions that find kernels, or compute with them, by their modules; each gives None where there is none."""
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def cases(
    rows: int = 4, length: int = 256, tokens: Sequence[int] = (1, 4, 16), dtype: torch.dtype = torch.float32
) -> Mapping[str, Call]:
    """By name, a call of a primitive; rows and length are those of training, tokens those of steps of decode. Those that have a
    kernel on this CPU for `dtype`."""
    draw = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    def call(name: str, *operands: Tensor | None, **params: object) -> Call:
        primitive = PRIMITIVES[name.removesuffix("_bwd")]
        implementation = primitive.bwd.impl if name.endswith("_bwd") else primitive.impl

        def run() -> Sequence[Tensor]:
            results = implementation(*operands, **params)
            return results if isinstance(results, (list, tuple)) else [results]

        return run

    q, dout = (make(rows, length, HEADS, SIZE) for _ in range(2))
    k, v = (make(rows, length, KV_HEADS, SIZE) for _ in range(2))
    how = {"causal": True, "window": None, "scale": SIZE**-0.5, "soft_cap": None}
    attention = [q, k, v, *[None] * 5]
    out, lse = call("attention", *attention, **how)()
    x, dy, weight = make(rows, length, 256), make(rows, length, 256), make(256)
    gate, up, dhidden = (make(rows, length, 688) for _ in range(3))
    cos, sin = (make(1, length, SIZE // 2).float() for _ in range(2))
    found = {}
    if dtype == torch.float32 or not onednn_has_bfloat16():
        found["attention"] = call("attention", *attention, **how)
        found["attention_bwd"] = call("attention_bwd", *attention, out, lse, dout, None, **how)
    found |= {
        "rms_norm": call("rms_norm", x, weight, eps=1e-6),
        "rms_norm_bwd": call("rms_norm_bwd", x, weight, dy, eps=1e-6),
        "rope": call("rope", q, cos, sin, interleaved=False),
        "swiglu": call("swiglu", gate, up),
        "swiglu_bwd": call("swiglu_bwd", gate, up, dhidden),
    }
    for count in tokens:
        (weight_DF,) = lay_by_columns([make(256, 1376)], (0,))
        found[f"product, {count} rows"] = call("einsum", make(1, count, 256), weight_DF, equation="bsd,df->bsf")
    if dtype == torch.float32 and matmul_is_faster():
        found["product"] = call("einsum", gate, make(688, 256), equation="bsf,fd->bsd")
        found["product, gradient of x"] = call("einsum", gate, make(256, 688), equation="bsf,df->bsd")
        found["product of an adapter"] = call("einsum", gate, make(688, 8), equation="bsf,fr->bsr")
    if dtype == torch.float32:
        logits, labels = make(rows, length, 2048), torch.randint(2048, (rows, length), generator=draw)
        how = {"ignore_index": -100, "vocab_size": 2048, "start": 0, "label_smoothing": 0.0}
        loss, lse = call("cross_entropy", logits, labels, **how)()
        found["cross_entropy"] = call("cross_entropy", logits, labels, **how)
        found["cross_entropy_bwd"] = call("cross_entropy_bwd", logits, labels, lse, loss, None, **how)
    pages = torch.randperm(16 * 64, generator=draw).view(1, 16, 64)
    pools = make(1, 16 * 64 * PAGE, KV_HEADS, SIZE), make(1, 16 * 64 * PAGE, KV_HEADS, SIZE)
    for count in tokens:
        at = torch.arange(count)[None], torch.full((1, count), BEFORE), pages
        how = {"shard": False, "page_size": PAGE, "window": None, "scale": SIZE**-0.5, "soft_cap": None}
        found[f"paged_attention, {count} tokens"] = call("paged_attention", make(1, count, HEADS, SIZE), *pools, *at, None, **how)
    if screens_logits(dtype):
        screen = Screen(torch.zeros(32_768, 256, dtype=torch.uint8), *torch.zeros(2, 32_768, dtype=torch.int32))
        table_VD = make(32_768, 256)
        fill_screen(screen, table_VD)
        for count in (count for count in tokens if count <= MAX_SCREENED_ROWS):
            found[f"largest_logits, {count} rows"] = _largest(make(1, count, 256), table_VD, screen)
    return found


def _largest(x_BRD: Tensor, table_VD: Tensor, screen: Screen[Tensor]) -> Call:
    """The largest logit of each row, as it is found for tokens that are not drawn."""
    greedy_BR = torch.ones(x_BRD.shape[:2], dtype=torch.bool)
    return lambda: [largest_logits(x_BRD, table_VD, screen, greedy_BR).amax(-1)]


def measure(calls: Mapping[str, Call], passes: int, turns: int) -> list[Result]:
    """A line for each call. Raises AssertionError if results differ."""
    results = []
    for name, call in calls.items():
        ours, (theirs, _) = call(), _by_torch(call)
        error = max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True))
        dtype = ours[0].dtype
        assert error <= LARGEST_ERROR[dtype], f"{name}: results differ by {error:.1e}"
        times = [[[], []] for _ in range(passes)]
        for mine, other in times:
            for _ in range(turns):
                start = time.perf_counter()
                call()
                mine.append(time.perf_counter() - start)
                other.append(_by_torch(call)[1])
        ratio = paired_ratio([mine for mine, _ in times], [other for _, other in times])
        columns = [sorted(1e6 * second for each in times for second in each[place]) for place in (0, 1)]
        line = {"bench": "cpp", "call": name, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        line |= {"error": float(f"{error:.1e}")}
        line |= {key: round(column[len(column) // 2], 1) for key, column in zip(("mpar_us", "torch_us"), columns, strict=True)}
        results.append(Result.of(line | {"mpar_over_torch": ratio.rounded()}, this_run()))
    return results


def _by_torch(call: Call) -> tuple[Sequence[Tensor], float]:
    """The results without kernels, and the seconds that they took."""
    with _without_kernels():
        start = time.perf_counter()
        results = call()
        return results, time.perf_counter() - start


@contextmanager
def _without_kernels() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in KERNELS:
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        yield


def table(results: Sequence[Result]) -> str:
    """Markdown: a row for each call."""
    rows = ["| call | dtype | threads | mpar, us | torch, us | mpar / torch (95 %) |", "|---" * 6 + "|"]
    rows += [
        f"| {r.text('call')} | {r.text('dtype')} | {r.case['threads']} | {r.number('mpar_us'):.0f} | {r.number('torch_us'):.0f} "
        f"| {interval_text(r.numbers('mpar_over_torch'))} |"
        for r in results
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    """Run what the command line asks for. Returns 1 where there are no kernels."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=[str(dtype).removeprefix("torch.") for dtype in LARGEST_ERROR], default="float32")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="calls of a pass, of each side")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpp.jsonl")
    args = parser.parse_args()
    if _rows.cpp_function("rows", "swiglu_float32", 4) is None:
        sys.stderr.write("there are no kernels: this machine has no C++ compiler, or a CPU without AVX2\n")
        return 1
    torch.set_num_threads(args.threads)
    results = measure(cases(dtype=getattr(torch, args.dtype)), args.passes, args.turns)
    append_results(args.out, results)
    sys.stdout.write(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
