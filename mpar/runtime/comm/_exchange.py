"""Exchange: every rank gets a JSON value of every other. Unlike torch's exchange of objects it unpickles nothing, so that whoever
can write to a connection cannot make a rank run code."""

import json

import torch
import torch.distributed as dist

from mpar.plain_value import PlainValue

__all__ = ["exchange"]


def exchange(value: PlainValue) -> list:
    """`value`, what JSON has, of every rank of the world, in the order of ranks. All ranks must call this together."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sent = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([sent.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: sent.numel()] = sent
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(received, sizes, strict=True)]
