"""One rank of a launch: traced, declared, transformers with FSDP2, and the products of a step alone take one turn each."""

import pickle
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from bench._rank import local_state
from bench._turns import Rank, joined, run_passes
from bench.imported._subject import CLIP_NORM, SETTINGS, batches
from mpar.models.traced import load_transformers
from mpar.program import batch_rows

__all__ = ["main"]

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", _ATTENTION, f"{_ATTENTION}_backward")


def _compiled(rank: Rank, name: str) -> Callable[[], torch.Tensor]:
    """The step of a program."""
    program = pickle.loads((rank.work / f"{name}.pickle").read_bytes())
    run, data = program.bind(), batches(rank.args.size)
    state = [local_state(program, torch.load(rank.work / f"{name}.pt"), rank.rank)]

    def step() -> torch.Tensor:
        tokens, labels = next(data)
        state[0], metrics = run(state[0], batch_rows(program, {"tokens": tokens, "labels": labels}, rank.rank))
        return metrics["loss"]

    return step


def _transformers(rank: Rank) -> Callable[[], torch.Tensor]:
    """The step of transformers' own model, its layers sharded by FSDP2."""
    model = load_transformers().AutoModelForCausalLM.from_pretrained(rank.work / "hf", dtype=torch.float32).train()
    if rank.num_ranks > 1:
        mesh = init_device_mesh("cpu", (rank.num_ranks,))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS, fused=True)
    data = batches(rank.args.size)

    def step() -> torch.Tensor:
        tokens, labels = (x.chunk(rank.num_ranks)[rank.rank] for x in next(data))
        loss = F.cross_entropy(model(input_ids=tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / rank.num_ranks
        if rank.num_ranks > 1:
            torch.distributed.all_reduce(mean)
        return mean

    return step


class _Recorder(TorchDispatchMode):
    """Keeps the calls of matrix products and attention, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _products(rank: Rank) -> Callable[[], torch.Tensor]:
    """The matrix products and the attention that transformers' step makes on this rank, on operands that lie ready: the floor."""
    model = load_transformers().AutoModelForCausalLM.from_pretrained(rank.work / "hf", dtype=torch.float32).train()
    tokens, labels = (x.chunk(rank.num_ranks)[rank.rank] for x in next(batches(rank.args.size)))
    recorder = _Recorder()
    with recorder:
        F.cross_entropy(model(input_ids=tokens, use_cache=False).logits.flatten(0, 1), labels.flatten()).backward()

    def step() -> torch.Tensor:
        for func, args, kwargs in recorder.calls:
            func(*args, **kwargs)
        return torch.zeros(())

    return step


def main() -> None:
    """Entry of one rank."""
    rank = joined(texts=["size"])
    others = {"transformers": _transformers, "floor_products": _products}
    run_passes({name: others[name](rank) if name in others else _compiled(rank, name) for name in rank.variants}, rank)


if __name__ == "__main__":
    main()
