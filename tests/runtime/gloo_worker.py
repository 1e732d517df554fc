"""One of four processes: trains the same small model under several strategies, counting messages at the transport.

usage: torchrun --nproc-per-node 4 gloo_worker.py FOLDER
"""

import pathlib
import sys
from dataclasses import replace

from mpar import models
from mpar.compiler import RecomputePolicy, Schedule
from mpar.hardware import hardware
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.gloo_training import random_batches, train_cases
from tests.small_llama import CONFIG

GATHERED_AGAIN = RecomputePolicy("selective", frozenset({"rms_norm", "all_gather", "attn_norm", "mlp_norm"}))
SLOW = replace(hardware("reference"), link_bytes_per_s=1e9, link_latency_s=1e-7, launch_s=0.0, memory_bytes_per_s=1e11)
CASES = {
    "fsdp2_tp2_sp": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", {}),
    "fsdp4": (Mesh(fsdp=4), "zero3", {}),
    "fsdp4_units": (Mesh(fsdp=4), "zero3", {"bucket_bytes": 0}),
    "fsdp4_kept": (Mesh(fsdp=4), replace(preset("zero3"), gather="keep"), {"bucket_bytes": 0}),
    "fsdp4_hidden": (Mesh(fsdp=4), "zero3", {"bucket_bytes": 0, "hardware": hardware("h100_dgx")}),
    "dp4": (Mesh(dp=4), "ddp", {}),
    "dp4_hidden": (Mesh(dp=4), "ddp", {"bucket_bytes": 0, "hardware": hardware("h100_dgx")}),
    "tp4_sp": (Mesh(tp=4), "tp_sp", {}),
    "tp4_sp_again": (Mesh(tp=4), "tp_sp", {"recompute": GATHERED_AGAIN}),
    "tp4_sp_hidden": (Mesh(tp=4), "tp_sp", {"hardware": SLOW}),
    "tp2_sp_paired": (Mesh(dp=2, tp=2), "tp_sp", {"hardware": SLOW, "num_microbatches": 2, "schedule": Schedule(paired=True)}),
    "tp4": (Mesh(tp=4), "tp", {}),
}
OPTIMIZER = AdamW(lr=3e-4, clip_norm=1.0)
SHAPE = (8, 16)
BATCHES = random_batches(20, SHAPE, vocab_size=96)


MODEL = models.from_config(CONFIG)


def make_program(case):
    """The program of a case; "one" is a single rank."""
    mesh, strategy, options = CASES.get(case, (Mesh(dp=1), "ddp", {}))
    return compile_step(MODEL, OPTIMIZER, mesh, strategy, SHAPE, **options)


def make_params(case):
    """The same parameters for every case."""
    return MODEL.init(0)


if __name__ == "__main__":  # test_comm.py shows that shared memory has the same bits as the backend, whose messages are counted
    train_cases(pathlib.Path(sys.argv[1]), make_params, lambda case: "backend", lambda case: BATCHES)
