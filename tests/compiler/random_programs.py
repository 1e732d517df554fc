"""Random programs, each the same for its seed: as it is written, and as it is ordered for random hardware."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mpar import Mesh, models
from mpar.compiler import Schedule, policy
from mpar.forecast import predicted_times
from mpar.hardware import Hardware
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step
from tests.compiler.box import BOX
from tests.small_llama import CONFIG

__all__ = ["MODEL", "Pair", "both", "makespan", "random_pair"]

MODEL = models.from_config({**CONFIG, "num_hidden_layers": 4}).with_dtype(torch.float64)
OPTIMIZER = AdamW(lr=1e-3)
MESHES = [
    (Mesh(dp=2), "ddp"),
    (Mesh(fsdp=2), "zero2"),
    (Mesh(fsdp=4), "zero3"),
    (Mesh(dp=2, fsdp=2), "hsdp"),
    (Mesh(tp=2), "zero3_tp_sp"),
    (Mesh(fsdp=2, tp=2), "zero3_tp_sp"),
    (Mesh(pp=2, tp=2), "zero3_tp_sp"),
    (Mesh(pp=2, fsdp=2), "zero3"),
    (Mesh(pp=2), "ddp"),
]


@dataclass(frozen=True)
class Pair:
    """A program as it is written, and as it is ordered for `hardware`."""

    hardware: Hardware
    as_written: Program
    ordered: Program

    def check_order(self) -> None:
        """Assert that the ordered one is valid, takes no longer by prediction, and fits where the hardware has a limit."""
        self.ordered.verify()
        assert makespan(self.ordered, self.hardware) <= makespan(self.as_written, self.hardware)
        if self.hardware.memory_bytes:
            assert max(self.ordered.peaks()) <= 0.9 * self.hardware.memory_bytes


def both(
    make_model: Callable[[], models.Model], hardware: Hardware, mesh: Mesh, strategy: str, **options: object
) -> list[Program]:
    """The program as it is written, and as it is ordered for `hardware`."""
    options = {"num_microbatches": 2, "bucket_bytes": 0} | options
    return [
        compile_step(make_model(), OPTIMIZER, mesh, strategy, (8, 8), hardware=replace(hardware, overlaps=overlaps), **options)
        for overlaps in (False, True)
    ]


def makespan(program: Program, hardware: Hardware) -> float:
    """The predicted seconds of a step."""
    return predicted_times(program, hardware).makespan


def random_pair(seed: int) -> Pair:
    """Two of five pairs are for hardware that has just enough memory for the program as it is written."""
    rng = random.Random(seed)
    hardware, mesh, strategy, options = _random_case(rng)
    tight = rng.random() < 0.4
    programs = both(lambda: MODEL, hardware, mesh, strategy, **options)
    if tight:
        hardware = replace(hardware, memory_bytes=int(max(programs[0].peaks()) / 0.9) + 1)
        programs = both(lambda: MODEL, hardware, mesh, strategy, **options)
    return Pair(hardware, *programs)


def _random_case(rng: random.Random) -> tuple[Hardware, Mesh, str, dict[str, object]]:
    """Hardware with slow or fast links and much or little memory, and how to compile for it."""
    link = 10 ** rng.uniform(6.5, 9.5)
    hardware = replace(BOX, link_bytes_per_s=link, host_bytes_per_s=10 ** rng.uniform(7, 9), memory_bytes=rng.choice([0, 2**30]))
    mesh, strategy = rng.choice(MESHES)
    options = {
        "schedule": Schedule(
            rng.choice(["one_f_one_b", "gpipe", "zbv"]) if mesh.axis_size("pp") > 1 else "one_f_one_b", paired=rng.random() < 0.5
        ),
        "num_microbatches": 2 if mesh.axis_size(("dp", "fsdp")) == 4 else rng.choice([2, 4]),  # of 8 rows, one a rank at least
        "bucket_bytes": rng.choice([0, 6000, 2**25]),
        "prefetch_bytes": rng.choice([None, None, 0, 2**20]),
        "recompute": rng.choice([policy("none"), policy("full"), replace(policy("full"), offload=True)]),
    }
    if mesh.axis_size("pp") > 1 and rng.random() < 0.3:
        options["schedule"] = replace(options["schedule"], name="interleaved")
    return hardware, mesh, strategy, options
