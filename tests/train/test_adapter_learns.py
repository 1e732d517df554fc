"""The example of adapters in a short form: an adapter learns what its base, which stays as it is, has learned wrongly."""

import torch

from mpar import checkpoint
from tests.train.test_rollouts import arithmetic, trained  # noqa: F401  # a fixture

SFT = ("task=sft", "data.seq_len=64", "data.batch_size=8", "optimizer.lr=1e-2", "optimizer.lr_decay=constant")


def test_an_adapter_learns_what_its_base_did_not(arithmetic):  # noqa: F811
    """The base adds wrongly, as most of its examples do; an adapter of rank 4 on it halves the loss on right sums, and the base
    keeps its bits."""
    trained(arithmetic / "base", 60, *SFT, "data.sources=[noisy.jsonl]")
    base = checkpoint.latest(arithmetic / "base" / "checkpoints")
    adapter = ("adapter=lora", "adapter.rank=4", "adapter.alpha=16")
    records = trained(arithmetic / "lora", 80, *SFT, "data.sources=[prompts.jsonl]", *adapter, init=base)
    assert records[0].loss > 0.85
    assert sum(record.loss for record in records[-5:]) / 5 < 0.5
    with checkpoint.Reader(base) as before, checkpoint.Reader(checkpoint.latest(arithmetic / "lora" / "checkpoints")) as after:
        frozen = [name for name in before.tensors if name.startswith("params.")]
        assert all(torch.equal(before.read(name), after.read(name)) for name in frozen)
        grown = sum(after.read(name).numel() for name in after.tensors if name.startswith("params.adapters."))
        assert 0 < grown < 0.4 * sum(before.read(name).numel() for name in frozen)
