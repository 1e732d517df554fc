"""Megatron's own data: indexed files of tokens, the order of samples of its GPTDataset, and blends of several of them."""

from mpar.data.megatron._batches import IndexedBatches, IndexedOptions
from mpar.data.megatron._blend import blend, samples_for
from mpar.data.megatron._indexed import IndexedTokens, dtype_for
from mpar.data.megatron._indexed_writer import IndexedWriter
from mpar.data.megatron._samples import Samples, draw_samples

__all__ = [
    "IndexedBatches",
    "IndexedOptions",
    "IndexedTokens",
    "IndexedWriter",
    "Samples",
    "blend",
    "draw_samples",
    "dtype_for",
    "samples_for",
]
