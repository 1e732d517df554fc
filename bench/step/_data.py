"""Data: the same tokens and the same first weights for every variant, made on the device."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.step._case import Case

__all__ = ["NUM_BATCHES", "first_weights", "token_batches"]

NUM_BATCHES = 8
"""How many batches there are; after the last comes the first again."""


def token_batches(case: Case, device: torch.device) -> list[dict[str, Tensor]]:
    """Random tokens, and as labels the tokens that follow them; the last token has no label."""
    generator = torch.Generator(device).manual_seed(0)
    vocab_size, shape = case.config()["vocab_size"], (case.sequences, case.seq_len)
    batches = []
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(vocab_size, shape, generator=generator, device=device)
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
        batches.append({"tokens": tokens, "labels": labels})
    return batches


def first_weights(name: str, shape: Sequence[int], deviation: float, device: torch.device) -> Tensor:
    """The tensor that a Hugging Face folder has under `name`: ones for gains, zeros for biases, else random by the name alone."""
    if name.endswith("bias"):
        return torch.zeros(tuple(shape), device=device)
    if name.endswith("norm.weight"):
        return torch.ones(tuple(shape), device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(tuple(shape), device=device).normal_(0.0, deviation, generator=generator)
