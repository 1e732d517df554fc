"""Indexed files: what is written is what Megatron writes, what is read is what was written, and damage is named."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.data.megatron import IndexedTokens, IndexedWriter, dtype_for
from mpar.errors import DataError
from tests.tiers import examples

DOCUMENTS = [[[1, 2, 3], [4]], [], [[65_000]], [[5, 6]]]


def write(prefix, documents, dtype="<u2"):
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            tokens = np.array([token for sequence in document for token in sequence], np.int64)
            writer.add(tokens, [len(sequence) for sequence in document], [len(document)])


def test_bytes_are_those_of_the_format(tmp_path):
    """The header, lengths, offsets and ends of documents, in this order, little-endian; the tokens without anything else."""
    write(tmp_path / "a", DOCUMENTS)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected = header + struct.pack("<4i", 3, 1, 1, 2) + struct.pack("<4q", 0, 6, 8, 10) + struct.pack("<5q", 0, 2, 2, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<7H", 1, 2, 3, 4, 65_000, 5, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "<u2"), (65_500, "<i4"), (259, "<u2")])
def test_dtype_follows_from_the_vocabulary(vocab_size, dtype):
    """Two bytes below 65,500 entries, as Megatron chooses."""
    assert dtype_for(vocab_size) == np.dtype(dtype)


def test_what_is_written_is_read(tmp_path_factory):
    """Any documents, in any dtype, come back: sequences, parts of them, and documents."""
    sequences = st.lists(st.integers(0, 120), min_size=1, max_size=5)

    @settings(max_examples=examples(60))
    @given(st.lists(st.lists(sequences, max_size=3), max_size=6), st.sampled_from(["<u1", "<i2", "<i4", "<i8", "<u2"]))
    def check(documents, dtype):
        prefix = tmp_path_factory.mktemp("written") / "x"
        write(prefix, documents, dtype)
        read = IndexedTokens.open(prefix)
        flat = [sequence for document in documents for sequence in document]
        assert [read.sequence(i).tolist() for i in range(read.num_sequences)] == flat
        assert [read.sequence(i, 1, 2).tolist() for i in range(read.num_sequences)] == [s[1:3] for s in flat]
        assert np.diff(read.document_ends).tolist() == [len(document) for document in documents]
        assert read.num_documents == len(documents) and read.tokens.dtype == np.dtype(dtype)

    check()


def test_nothing_appears_after_an_error(tmp_path):
    """A token that the dtype cannot hold is refused, and no file is left, not even a part of one."""
    write(tmp_path / "kept", [[[7]]])
    before = (tmp_path / "kept.bin").read_bytes()
    with pytest.raises(DataError, match=r"cannot write tokens from 0 to 70000 .*uint16 holds 0 to 65535"):
        write(tmp_path / "kept", [[[0, 70_000]]])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["kept.bin", "kept.idx"]
    assert (tmp_path / "kept.bin").read_bytes() == before


DAMAGE = {
    "no index": (lambda bin_, idx: (bin_, None), "No such file"),
    "no tokens": (lambda bin_, idx: (None, idx), "No such file"),
    "other file": (lambda bin_, idx: (bin_, b"PAR1" + idx), "does not begin as an index"),
    "version": (lambda bin_, idx: (bin_, idx[:9] + b"\2" + idx[10:]), "version 2"),
    "dtype": (lambda bin_, idx: (bin_, idx[:17] + b"\7" + idx[18:]), "code 7, which is no integer"),
    "short index": (lambda bin_, idx: (bin_, idx[:-1]), "bytes; its 4 sequences take"),
    "short tokens": (lambda bin_, idx: (bin_[:-2], idx), "not inside the 12 bytes"),
    "half a token": (lambda bin_, idx: (bin_[:-1], idx), "no tokens of 2 bytes"),
    "count": (lambda bin_, idx: (bin_, idx[:18] + struct.pack("<Q", 2**60) + idx[26:]), "sequences take"),
    "ends": (lambda bin_, idx: (bin_, idx[:-8] + struct.pack("<q", 9)), "do not follow each other up to sequence 4"),
    "offset": (lambda bin_, idx: (bin_, idx[:50] + struct.pack("<q", 1) + idx[58:]), "inside a token"),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path, name):
    """A file that is missing, short, or does not fit the other is refused with what is wrong."""
    write(tmp_path / "a", DOCUMENTS)
    spoil, reason = DAMAGE[name]
    for suffix, content in zip(("bin", "idx"), spoil(*[(tmp_path / f"a.{s}").read_bytes() for s in ("bin", "idx")]), strict=True):
        path = tmp_path / f"a.{suffix}"
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        IndexedTokens.open(tmp_path / "a")
