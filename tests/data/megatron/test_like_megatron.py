"""Samples and blends are those of megatron-core, number for number."""

import sys
import warnings

import numpy as np
import pytest

from mpar.data import BatchShape
from mpar.data.megatron import IndexedBatches, IndexedOptions, IndexedTokens, IndexedWriter, blend, draw_samples, samples_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="megatron-core has wheels for Linux alone")
CASES = range(20)


@pytest.fixture(scope="module")
def mcore():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_dataset, gpt_dataset, helpers, indexed_dataset, utils

    return {"blended": blended_dataset, "gpt": gpt_dataset, "helpers": helpers, "indexed": indexed_dataset, "utils": utils}


class Words:
    """What GPTDataset asks of a tokenizer."""

    vocab_size, eod, pad, unique_identifiers = 1000, 0, -1, {"class": "Words"}


def write_both(mcore, tmp_path, rng):
    """The same documents by both writers: the prefixes of Megatron's and of ours."""
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    builder = mcore["indexed"].IndexedDatasetBuilder(f"{theirs}.bin", np.uint16)
    with IndexedWriter(ours, np.dtype("<u2")) as writer:
        for _ in range(int(rng.integers(3, 40))):
            lengths = rng.integers(1, 30, int(rng.integers(0, 3))).tolist()
            tokens = rng.integers(0, 1000, sum(lengths))
            builder.add_document(tokens, lengths)
            writer.add(tokens, lengths, [len(lengths)])
    builder.finalize(f"{theirs}.idx")
    return theirs, ours


def gpt_dataset(mcore, prefix, *, num_samples, seq_len, seed, reset=False):
    config = mcore["gpt"].GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_len, blend=([prefix], None), split="1", tokenizer=Words(), mmap_bin_files=True,
        reset_position_ids=reset, reset_attention_mask=reset, eod_mask_loss=False, create_attention_mask=True,
    )  # fmt: skip
    low = mcore["indexed"].IndexedDataset(prefix)
    indices = np.arange(len(low), dtype=np.int32)
    return mcore["gpt"].GPTDataset(low, prefix, indices, num_samples, mcore["utils"].Split.train, config), config


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_samples_of_gpt_dataset(mcore, tmp_path, case):
    """Both writers write the same bytes. Tokens, labels, positions and, where documents are kept apart, masks are Megatron's."""
    rng = np.random.default_rng(case)
    theirs, ours = write_both(mcore, tmp_path, rng)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"theirs.{suffix}").read_bytes() == (tmp_path / f"ours.{suffix}").read_bytes()
    reset, seq_len = case % 2 == 1, int(rng.integers(2, 12))
    num_samples = None if case % 4 == 0 else int(rng.integers(1, 200))
    expected, _ = gpt_dataset(mcore, theirs, num_samples=num_samples, seq_len=seq_len, seed=case, reset=reset)
    options = IndexedOptions(vocab_size=1000, num_samples=num_samples, eod_id=0 if reset else None)
    batches = IndexedBatches([IndexedTokens.open(ours)], BatchShape(1, seq_len), options, seed=case)
    assert batches.num_samples == len(expected)
    for k in range(len(expected)):
        sample, batch = expected[k], batches.batch(k)
        assert batch["tokens"][0].equal(sample["tokens"]) and batch["labels"][0].equal(sample["labels"])
        assert batch["positions"][0].equal(sample["position_ids"])
        documents = batch["documents"][0]
        seen = (documents[:, None] == documents[None, :]).tril()
        assert seen.equal(~sample["attention_mask"][0])


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_indices_and_blends_are_those_of_the_helpers(mcore, case):
    """The three indices of random documents, and blends with and without weights, equal those of the compiled helpers."""
    rng = np.random.default_rng(1000 + case)
    lengths = rng.integers(0, 50, int(rng.integers(5, 60))).astype(np.int32)
    documents = np.flatnonzero(rng.random(len(lengths)) < 0.7).astype(np.int32)
    seq_len, epochs = int(rng.integers(1, 20)), int(rng.integers(1, 5))
    total = int(lengths[documents].sum())
    samples = draw_samples(lengths, documents, seq_len=seq_len, num_samples=(epochs * total - 1) // seq_len, seed=case)
    assert np.array_equal(
        samples.starts, mcore["helpers"].build_sample_idx(lengths, samples.documents, seq_len, epochs, total, True, True)
    )
    weights = rng.random(int(rng.integers(2, 6))).tolist()
    count = int(rng.integers(1, 2000))
    chosen, numbers = np.zeros(count, np.int16), np.zeros(count, np.int64)
    shares = mcore["utils"].normalize(weights)
    mcore["helpers"].build_blending_indices(chosen, numbers, shares, len(weights), count, False)
    ours = blend(weights, count)
    assert np.array_equal(ours[0], chosen) and np.array_equal(ours[1], numbers)
    sizes = rng.integers(1, 300, len(weights)).tolist()
    chosen, numbers = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    mcore["helpers"].build_exhaustive_blending_indices(chosen, numbers, sizes, len(sizes))
    ours = blend(sizes, sum(sizes), sizes)
    assert np.array_equal(ours[0], chosen) and np.array_equal(ours[1], numbers)


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", range(4))
def test_blended_batches_are_those_of_blended_dataset(mcore, tmp_path, case):
    """Three files with weights: samples come in the order of BlendedDataset over GPTDatasets with their surplus."""
    rng = np.random.default_rng(2000 + case)
    prefixes = []
    for name in "abc":
        (tmp_path / name).mkdir()
        prefixes.append(write_both(mcore, tmp_path / name, rng))
    weights, wanted = rng.random(3).tolist(), int(rng.integers(20, 150))
    size, counts = samples_for(weights, wanted)
    made = [
        gpt_dataset(mcore, theirs, num_samples=count, seq_len=4, seed=case)
        for (theirs, _), count in zip(prefixes, counts, strict=True)
    ]
    expected = mcore["blended"].BlendedDataset([one for one, _ in made], weights, size, made[0][1])
    files = [IndexedTokens.open(ours) for _, ours in prefixes]
    options = IndexedOptions(vocab_size=1000, num_samples=wanted, weights=tuple(weights))
    batches = IndexedBatches(files, BatchShape(1, 4), options, seed=case)
    assert batches.num_samples == size
    for k in range(size):
        assert batches.batch(k)["tokens"][0].equal(expected[k]["tokens"])
