"""Overhead: the time per action that running a program takes beyond a loop written by hand that calls the same segments' code.

There is one rank, no messages, and a model so small that nothing else counts.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench._machine import this_run
from bench._result import Result
from mpar import models
from mpar.compiler import Schedule
from mpar.mesh import Mesh
from mpar.optim import SGD
from mpar.program import Program
from mpar.program.compile import compile_step
from mpar.runtime import ALONE, RankRun

__all__ = ["overhead"]

MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}


def overhead(chunks: int, microbatches: int, repeats: int) -> list[Result]:
    """A result for each schedule: microseconds per action of the program's run, of the loop by hand, and their difference."""
    model = models.from_config(MODEL, vocab_multiple=1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 16, (microbatches, 9), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    origin, results = this_run(), []
    for name in ("interleaved", "looped_bfs", "zb1p"):
        schedule = Schedule(name, num_chunks=chunks)
        program = compile_step(
            model, SGD(lr=0.0), Mesh(), "ddp", (microbatches, 8), num_microbatches=microbatches, schedule=schedule
        )
        state = program.init_state(model.init(0))
        run = program.bind()
        by_hand = _loop(run, program, batch, state)
        for _ in range(3):
            state, _ = run(state, batch)
            by_hand()
        ours, theirs = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            state, _ = run(state, batch)
            between = time.perf_counter()
            by_hand()
            ours.append(between - began)
            theirs.append(time.perf_counter() - between)
        actions = len(program.schedule[0])
        extra = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
        figures = {
            "us_per_action": round(1e6 * extra / actions, 2),
            "run_ms": round(1e3 * statistics.median(ours), 3),
            "loop_ms": round(1e3 * statistics.median(theirs), 3),
            "actions": actions,
            "instructions": len(program.instructions),
            "bar_us": 20.0,
        }
        results.append(Result({"variant": name}, figures, origin))
    return results


def _loop(run: RankRun, program: Program, batch: dict[str, torch.Tensor], state: Any) -> Callable[[], None]:
    """A loop with the same calls of the same code on the same values, but without dictionaries, frees and checks."""
    source, names = ["def loop(v, f, comm):"], program.values
    for line, step in enumerate(program.instructions):
        inputs = ", ".join(f"v[{i}]" for i in step.inputs)
        outputs = "".join(f"v[{i}], " for i in step.outputs)
        source.append(f"    {outputs + '= ' if outputs else ''}f[{line}]([{inputs}], comm)")
        source += [f"    v[{i}] = None" for i in step.frees]
    scope: dict[str, Any] = {}
    exec("\n".join(source), scope)
    functions = [step[0] for step in run._steps]
    leaves = {leaf.path: state.leaves[leaf.path].clone() for leaf in program.state_in}

    def call() -> None:
        values: list[Any] = [None] * len(names)
        for leaf in program.state_in:
            values[leaf.value] = leaves[leaf.path]
        for leaf in program.parts[0].batch:
            values[leaf.value] = run._rows(leaf, batch)
        for leaf, number in zip(program.parts[0].scalars, (0.0, 1.0), strict=True):
            values[leaf.value] = torch.tensor(number, dtype=leaf.dtype)
        with torch.no_grad():
            scope["loop"](values, functions, ALONE)
        for leaf in program.parts[0].state_out:
            leaves[leaf.path] = values[leaf.value]

    return call
