"""One of four processes: trains the same small model under several strategies, counting messages at the transport.

usage: torchrun --nproc-per-node 4 gloo_worker.py OUT
"""

import pathlib
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mpar import models, tree
from mpar.compiler import RecomputePolicy
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import State, batch_rows
from mpar.program.compile import compile_step
from mpar.runtime import Counter
from mpar.shards import shard
from mpar.strategy import preset
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


def make_batches(count=20):
    """Random tokens and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(count):
        tokens, labels = (torch.randint(0, 96, SHAPE, generator=generator) for _ in range(2))
        labels[torch.rand(SHAPE, generator=generator) < 0.2] = -100
        out.append({"tokens": tokens, "labels": labels})
    return out


def make_program(case):
    """(program, global state) of a case; "one" is a single rank."""
    mesh, strategy, options = CASES.get(case, (Mesh(dp=1), "ddp", {}))
    model = models.from_config(CONFIG)
    program = compile_step(model, OPTIMIZER, mesh, strategy, SHAPE, **options)
    params = tree.leaves_with_path(model.init(0))
    leaves = {f"params.{path}": x for path, x in params}
    leaves |= {f"opt.{slot}.{path}": torch.zeros_like(x) for slot in OPTIMIZER.slots for path, x in params}
    return program, State(leaves)


def main(out):
    """Train every case; rank 0 saves losses, messages of one step, and the final parameters of its shard."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for case in CASES:
        program, state = make_program(case)
        local = State({leaf.path: shard(state.leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in program.state_in})
        counter = Counter()
        run = program.bind(counter=counter, transport="backend")  # test_comm.py shows that shared memory has the same bits
        losses, norms = [], []
        for batch in make_batches():
            counter.messages.clear()
            local, metrics = run(local, batch_rows(program, batch, rank))
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
        results[case] = {
            "losses": torch.stack(losses),
            "norms": torch.stack(norms),
            "messages": counter.messages,
            "leaves": local.leaves,
        }
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
