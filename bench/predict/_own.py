"""Own: steps on this machine, predicted from what `mpar measure` finds here, then run."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mpar import models
from mpar.hardware import Hardware, hardware
from mpar.measure import Machine, facts_of, measure_machine, profile_of
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, batch_rows
from mpar.program.compile import compile_step

__all__ = ["CASES", "Case", "Timed", "profile_here", "run_case"]

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
_NANO = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 64}
_TINY = {"hidden_size": 256, "intermediate_size": 688, "head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 256}
_GELU = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "max_position_embeddings": 256}
_FOUR = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
SHAPES = {
    "nano": ({**_LLAMA, **_FOUR, **_NANO}, 8, 64),
    "tiny": ({**_LLAMA, **_FOUR, **_TINY}, 8, 256),
    "gelu": ({"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True, **_FOUR, **_GELU}, 8, 256),
}
"""The shapes of the other benchmarks, and one with GELU and layer norms: model, rows, length."""


@dataclass(frozen=True)
class Case:
    """One step: a model of SHAPES on a mesh. transport: how ranks exchange, as `mpar measure` takes it; None for one rank."""

    model: str
    mesh: dict[str, int]
    strategy: str
    transport: str | None = None
    recompute: str = "none"
    schedule: str = "one_f_one_b"
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return Mesh(**self.mesh).size

    @property
    def name(self) -> str:
        """All that tells this case from others."""
        sizes = "x".join(f"{axis}{size}" for axis, size in self.mesh.items())
        words = [self.model, sizes, self.strategy, self.transport or "", self.schedule if "pp" in self.mesh else ""]
        words += ["full recompute" if self.recompute == "full" else ""]
        return " ".join(word for word in words if word)

    def program(self, on: Hardware) -> Program:
        """The compiled step."""
        config, rows, length = SHAPES[self.model]
        return compile_step(
            models.from_config(config),
            AdamW(lr=1e-4),
            Mesh(**self.mesh),
            self.strategy,
            (rows, length),
            schedule=self.schedule,
            num_microbatches=self.microbatches,
            recompute=self.recompute,
            hardware=on,
        )


def _cases() -> list[Case]:
    cases = [Case(model, {"dp": 1}, "ddp", recompute=kind) for model in SHAPES for kind in ("none", "full")]
    for model in ("nano", "tiny"):
        for transport in ("shared", "backend"):
            cases += [Case(model, {"dp": 2}, "ddp", transport), Case(model, {"fsdp": 2}, "zero3", transport)]
            cases += [Case(model, {"tp": 2}, "tp_sp", transport), Case(model, {"cp": 2}, "ddp", transport)]
            cases.append(Case(model, {"pp": 2}, "ddp", transport, microbatches=4))
    cases += [Case("tiny", {"fsdp": 2}, "zero3", "shared", recompute="full"), Case("tiny", {"fsdp": 2}, "zero1", "shared")]
    return [*cases, Case("gelu", {"tp": 2}, "tp_sp", "shared"), Case("gelu", {"dp": 2}, "ddp", "shared")]


CASES = _cases()


@dataclass(frozen=True)
class Timed:
    """A case, seconds of its step as predicted, and of each step that was run."""

    case: Case
    predicted_s: float
    steps_s: Sequence[float] = field(default_factory=tuple)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """By what share of the measured time the predicted one is longer."""
        return self.predicted_s / self.measured_s - 1


def profile_here(ranks: int, transport: str | None, report: Callable[[str], None]) -> Hardware:
    """What `mpar measure` finds for so many ranks of one thread each."""
    machine = Machine(ranks, "cpu", 1, transport)
    rates = measure_machine(machine, lambda name, rate: report(f"{ranks} ranks, {transport}: {name} {rate:.3g}"))
    facts = {name: value for name, value in facts_of(machine).items() if name != "device"}
    return profile_of("here", rates, facts, hardware("cpu"))


def run_case(case: Case, on: Hardware, steps: int) -> Timed:
    """Predict a case, then run `steps` steps of it after three that do not count."""
    predicted = case.program(on).predict(on).step_s
    assert predicted is not None
    told = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (case, on, steps, str(Path(folder, "store")), told), case.ranks)  # type: ignore[no-untyped-call]
    return Timed(case, predicted, told.get())


def _rank(rank: int, case: Case, on: Hardware, steps: int, store: str, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks)
    program, (config, rows, length) = case.program(on), SHAPES[case.model]
    run = program.bind(transport=case.transport)
    state = program.init_state(models.from_config(config).init(seed=0), rank)
    tokens = torch.randint(config["vocab_size"], (rows, length + 1), generator=torch.Generator().manual_seed(0))
    batch = batch_rows(program, {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}, rank)
    times = []
    for _ in range(steps + 3):
        dist.barrier()
        begun = time.perf_counter()
        state, metrics = run(state, batch)
        metrics["loss"].item()
        dist.barrier()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        told.put(times[3:])
    dist.destroy_process_group()
