"""Cases that four processes on gloo train: what a worker does, and what a test reads of it."""

import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpar.program import Program, State, batch_rows
from mpar.runtime import Counter
from mpar.shards import shard
from tests.processes import torchrun

__all__ = ["assert_bits_equal", "launch", "random_batches", "simulate", "train_cases"]


def random_batches(count: int, shape: tuple[int, int], vocab_size: int) -> list[dict[str, Tensor]]:
    """Random tokens and labels, some of which do not count."""
    generator, out = torch.Generator().manual_seed(0), []
    for _ in range(count):
        tokens, labels = (torch.randint(0, vocab_size, shape, generator=generator) for _ in range(2))
        labels[torch.rand(shape, generator=generator) < 0.2] = -100
        out.append({"tokens": tokens, "labels": labels})
    return out


def launch(worker: pathlib.Path, folder: pathlib.Path, programs: Mapping[str, Program]) -> dict[str, dict[str, Any]]:
    """What rank 0 of four processes found for each program: losses, norms, messages of one step, its shards at the end."""
    for case, program in programs.items():
        (folder / f"{case}.pickle").write_bytes(pickle.dumps(program))
    done = torchrun(worker, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt")


def train_cases(
    folder: pathlib.Path,
    make_params: Callable[[str], Any],
    transport_of: Callable[[str], str | None],
    batches_of: Callable[[str], Sequence[dict[str, Tensor]]],
) -> None:
    """In one of the processes: train the cases that the folder has programs of; rank 0 saves what it found.

    make_params: the global parameters of a case. transport_of: what carries its messages. batches_of: what it is trained
    on, a batch for each step.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for path in sorted(folder.glob("*.pickle")):
        program = pickle.loads(path.read_bytes())
        state = program.init_state(make_params(path.stem), rank)
        results[path.stem] = _train(rank, program, state, transport_of(path.stem), batches_of(path.stem))
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def _train(
    rank: int, program: Program, state: State, transport: str | None, batches: Sequence[dict[str, Tensor]]
) -> dict[str, object]:
    counter, metrics = Counter(), []
    run = program.bind(counter=counter, transport=transport)
    for batch in batches:
        counter.messages.clear()
        state, found = run(state, batch_rows(program, batch, rank))
        metrics.append(found)
    return {**_stacked(metrics), "messages": counter.messages, "leaves": state.leaves}


def simulate(program: Program, state: State, batches: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], State]:
    """Losses and norms of the same steps in this process, and the state at the end."""
    metrics = []
    for batch in batches:
        state, found = program.simulate(state, batch)
        metrics.append(found)
    return _stacked(metrics), state


def _stacked(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"losses": torch.stack([m["loss"] for m in metrics]), "norms": torch.stack([m["grad_norm"] for m in metrics])}


def assert_bits_equal(found: dict[str, Any], program: Program, expected: dict[str, Tensor], state: State) -> None:
    """Losses, norms and the shards of rank 0 are those of a simulation, bit for bit."""
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    for leaf in program.part(0).state_out:
        assert torch.equal(found["leaves"][leaf.path], shard(state.leaves[leaf.path], leaf.spec, program.mesh, 0)), leaf.path
