"""One of several processes: takes a few steps of each program in a folder, all collectives over gloo.

usage: torchrun --nproc-per-node N order_worker.py FOLDER
"""

import pathlib
import pickle
import sys

import torch
import torch.distributed as dist

from mpar.program import Program, batch_rows
from tests.compiler.random_programs import MODEL

TIMEOUT_S = 120.0


Tensors = dict[str, torch.Tensor]
Key = tuple[int, str]
"""The seed of a program, and whether it is as it is written or ordered."""
Results = dict[Key, tuple[Tensors, Tensors]]
"""The metrics of all steps of a program on a rank, and the state of the rank behind the last."""


def stacked(metrics: list[Tensors]) -> Tensors:
    """The metrics of several steps as one tensor for each."""
    return {name: torch.stack([found[name] for found in metrics]) for name in metrics[0]}


def train(program: Program, batches: list[Tensors]) -> tuple[Tensors, Tensors]:
    """What this rank finds. No memory is shared, so that queues with collectives are threads."""
    rank, metrics = dist.get_rank(), []
    state, run = program.init_state(MODEL.init(0), rank), program.bind(transport="backend", timeout_s=TIMEOUT_S)
    for batch in batches:
        state, found = run(state, batch_rows(program, batch, rank))
        metrics.append(found)
    return stacked(metrics), state.leaves


def main(folder: pathlib.Path) -> None:
    """Run all programs; every rank saves its own results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs, batches = pickle.loads((folder / "programs.pickle").read_bytes())
    results: Results = {}
    for key, program in programs.items():
        try:
            results[key] = train(program, batches)
        except Exception as error:
            error.add_note(f"this was program {key}")
            raise
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
