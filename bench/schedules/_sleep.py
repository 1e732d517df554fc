"""Predicted against measured time: four ranks on gloo whose stages sleep for given times, one of them twice as long.

Sleeping needs no CPU, so on any machine it is the order of the program, its messages and its waits that are measured.
`python -m bench.schedules sleep` prints a line for each schedule: predicted and measured seconds and their ratio.
"""

import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench._launch import launch
from bench._machine import this_run
from bench._result import Result
from mpar import models
from mpar.forecast import step_times
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, batch_rows
from mpar.program.compile import compile_step

__all__ = ["measure", "sleep"]

RANKS, MICROBATCHES, STEPS, SLOW_STAGE = 4, 8, 3, 2
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv", "dual_pipe_v")
SLEEPS_S = {"forward": 0.03, "backward": 0.06, "backward_input": 0.035, "backward_weight": 0.025}
MESSAGE_S = 0.001
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


def durations(program: Program) -> list[list[float]]:
    """Seconds that each instruction sleeps. The layers of a stage share its seconds equally; embedding and head do not sleep."""
    stage_of = program.facts.stage_of
    layers = {stage: sum(s == stage and name.startswith("layer") for name, s in stage_of.items()) for stage in stage_of.values()}

    def seconds(op: str, segment: str) -> float:
        if op not in SLEEPS_S or not segment.startswith("layer"):
            return 0.0
        stage = stage_of[segment]
        return SLEEPS_S[op] / layers[stage] * (2 if stage == SLOW_STAGE else 1)

    return [[seconds(step.op, step.segment) for step in part.instructions] for part in program.parts]


class Stopwatch:
    """Sleeps before instructions, and keeps when each of them began."""

    def __init__(self, sleeps: list[float]) -> None:
        self.sleeps, self.began, self.asleep = sleeps, [0.0] * (len(sleeps) + 1), True

    def __call__(self, line: int, _: object) -> None:
        self.began[line] = time.perf_counter()
        if self.asleep and self.sleeps[line]:
            time.sleep(self.sleeps[line])

    def took(self, program: Program, position: int) -> list[float]:
        """Seconds that each instruction of the last step took; 0 for those that wait for other ranks."""
        meets = {name for name, kind in program.kinds.items() if kind.collectives}
        steps = program.parts[position].instructions
        spans = zip(self.began[:-1], self.began[1:], strict=True)
        return [0.0 if s.op == "wait" or s.kind in meets else b - a for s, (a, b) in zip(steps, spans, strict=True)]


def measure(folder: Path) -> None:
    """Entry of one rank: steps of every schedule; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), models.from_config(CONFIG)
    params = model.init(0)
    batch = {key: torch.zeros((MICROBATCHES, 4), dtype=torch.int64) for key in ("tokens", "labels")}
    for name in SCHEDULES:
        program = pickle.loads((folder / f"{name}.pickle").read_bytes())
        position = program.position(rank)
        watch = Stopwatch(durations(program)[position])
        run, state, awake, taken = program.bind(progress=watch), program.init_state(params, rank), [], []
        for number in range(2 * STEPS + 1):  # the first warms up; the next ones only compute, without sleep
            watch.asleep = number > STEPS
            dist.barrier()
            start = time.perf_counter()
            state, _ = run(state, batch_rows(program, batch, rank))
            watch.began[-1] = time.perf_counter()
            if number:
                (taken if watch.asleep else awake).append(
                    watch.began[-1] - start if watch.asleep else watch.took(program, position)
                )
        computation = [statistics.median(times) for times in zip(*awake, strict=True)]
        every: list[tuple[list[float], list[float]]] = [([], [])] * RANKS
        dist.all_gather_object(every, (computation, taken))
        if rank == 0:
            sys.stdout.write(json.dumps(_line(name, program, every)) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def _line(name: str, program: Program, every: Sequence[tuple[list[float], list[float]]]) -> dict[str, float | str]:
    """A schedule's time as predicted from sleeps and computation, its measured time, and their ratio."""
    both = zip(durations(program), (computation for computation, _ in every), strict=True)
    seconds = [[a + b for a, b in zip(*own, strict=True)] for own in both]
    messages = {step.message: MESSAGE_S for step in program.instructions if step.op == "send"}
    predicted = step_times(program, seconds, messages).makespan
    measured = statistics.median(max(step) for step in zip(*(taken for _, taken in every), strict=True))
    return {"schedule": name, "predicted_s": predicted, "measured_s": measured, "ratio": measured / predicted}


def sleep() -> list[Result]:
    """For each schedule the predicted seconds of a step, the median of those measured, and measured / predicted."""
    model = models.from_config(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        for name in SCHEDULES:
            program = compile_step(
                model, AdamW(lr=1e-3), Mesh(pp=RANKS), "ddp", (MICROBATCHES, 4), num_microbatches=MICROBATCHES, schedule=name
            )
            (Path(folder) / f"{name}.pickle").write_bytes(pickle.dumps(program))
        printed = launch(RANKS, "bench.schedules._sleep", [folder])
    origin = this_run()
    return [Result.of(json.loads(line), origin) for line in printed.splitlines()]


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
