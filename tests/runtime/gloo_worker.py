"""One of four processes: trains the same small model under several strategies, counting messages at the transport.

usage: torchrun --nproc-per-node 4 gloo_worker.py OUT CASE...
"""

import sys
from dataclasses import replace

import torch

from mpar import models, tree
from mpar.compiler import RecomputePolicy
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import State
from mpar.program.compile import compile_step
from mpar.shards import shard
from mpar.strategy import preset
from tests.gloo_training import random_batches, train_cases
from tests.small_llama import CONFIG

GATHERED_AGAIN = RecomputePolicy("selective", frozenset({"rms_norm", "all_gather", "attn_norm", "mlp_norm"}))
CASES = {
    "fsdp2_tp2_sp": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", {}),
    "fsdp4": (Mesh(fsdp=4), "zero3", {}),
    "fsdp4_units": (Mesh(fsdp=4), "zero3", {"bucket_bytes": 0}),
    "fsdp4_kept": (Mesh(fsdp=4), replace(preset("zero3"), gather="keep"), {"bucket_bytes": 0}),
    "dp4": (Mesh(dp=4), "ddp", {}),
    "tp4_sp": (Mesh(tp=4), "tp_sp", {}),
    "tp4_sp_again": (Mesh(tp=4), "tp_sp", {"recompute": GATHERED_AGAIN}),
    "tp4": (Mesh(tp=4), "tp", {}),
}
OPTIMIZER = AdamW(lr=3e-4, clip_norm=1.0)
SHAPE = (8, 16)
BATCHES = random_batches(20, SHAPE, vocab_size=96)


def make_program(case):
    """(program, global state) of a case; "one" is a single rank."""
    mesh, strategy, options = CASES.get(case, (Mesh(dp=1), "ddp", {}))
    model = models.from_config(CONFIG)
    program = compile_step(model, OPTIMIZER, mesh, strategy, SHAPE, **options)
    params = tree.leaves_with_path(model.init(0))
    leaves = {f"params.{path}": x for path, x in params}
    leaves |= {f"opt.{slot}.{path}": torch.zeros_like(x) for slot in OPTIMIZER.slots for path, x in params}
    return program, State(leaves)


def make_case(case, rank):
    """The program of a case, this rank's shards of its state, and the transport whose messages are counted."""
    program, state = make_program(case)
    local = {leaf.path: shard(state.leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in program.state_in}
    return program, State(local), "backend"  # test_comm.py shows that shared memory has the same bits


if __name__ == "__main__":
    train_cases(sys.argv[1], sys.argv[2:], make_case, BATCHES)
