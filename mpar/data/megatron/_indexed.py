"""Tokens in Megatron's indexed files: `NAME.bin` holds the tokens of all sequences, `NAME.idx` where each of them begins.

`NAME.idx` is little-endian: the 9 bytes of MMIDIDX and two zeros, the version 1 as uint64, the code of the dtype as one byte, the
number of sequences and the number of documents plus one as uint64; then the length of each sequence (int32), its first byte in
`NAME.bin` (int64), a zero, and for each document the sequence behind its last one (int64).

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpar.errors import DataError
from mpar.files import Unreadable, open_regular

__all__ = ["DTYPES", "HEADER", "IndexedTokens", "dtype_for"]

HEADER = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\0\0", 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""The code of each dtype that a file can have."""
_MAX_UINT16_VOCAB = 65_500
_PROBE = 2**14  # tokens


def dtype_for(vocab_size: int) -> "np.dtype[np.integer]":
    """The dtype that Megatron writes tokens of a vocabulary in: two bytes below 65,500 entries, else four."""
    return np.dtype("<u2" if vocab_size < _MAX_UINT16_VOCAB else "<i4")


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The sequences of a pair of files, mapped into memory.

    lengths:      tokens of each sequence, (sequences,) int32.
    starts:       the place of each sequence's first token in `tokens`, (sequences,) int64.
    document_ends: the number of sequences up to each document, (documents + 1,) int64, from 0 on.
    tokens:       all tokens, one sequence after the other, in the dtype of the file.
    """

    name: str
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    document_ends: NDArray[np.int64]
    tokens: NDArray[np.integer]

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> "IndexedTokens":
        """Map `prefix.bin` and `prefix.idx`. Raises DataError if one is missing, is no such file, or does not fit the other."""
        prefix = os.fspath(prefix)
        try:
            dtype, lengths, offsets, ends = _read_index(Path(f"{prefix}.idx"))
            tokens = _map(Path(f"{prefix}.bin"), dtype)
            size_bytes = lengths.astype(np.int64) * dtype.itemsize
            if len(lengths) and (lengths.min() < 0 or offsets.min() < 0 or (offsets + size_bytes).max() > tokens.nbytes):
                raise Unreadable(f"{prefix}.idx has sequences that are not inside the {tokens.nbytes:,} bytes of {prefix}.bin")
            if (offsets % dtype.itemsize).any():
                raise Unreadable(f"{prefix}.idx has sequences that begin inside a token of {dtype.itemsize} bytes")
        except Unreadable as error:
            raise DataError(
                f"cannot read the indexed tokens {prefix}: {error}.\n"
                "Name the files without .bin and .idx. Megatron's tools/preprocess_data.py and `mpar preprocess` write them."
            ) from None
        return cls(prefix, lengths, offsets // dtype.itemsize, ends, tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the lengths and documents, and of the tokens in 64 places, since a file may have billions of them."""
        digest = hashlib.sha256(f"{self.tokens.dtype} {len(self.tokens)}".encode())
        for array in (self.lengths, self.starts, self.document_ends):
            digest.update(np.ascontiguousarray(array).data)
        for first in np.linspace(0, max(0, len(self.tokens) - _PROBE), 64, dtype=np.int64).tolist():
            digest.update(np.ascontiguousarray(self.tokens[first : first + _PROBE]).data)
        return digest.hexdigest()

    @property
    def num_sequences(self) -> int:
        """Sequences in the files."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the files, those without a sequence included."""
        return len(self.document_ends) - 1

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """The tokens of a sequence from `offset` on, all of them or `length`."""
        start, size = int(self.starts[number]), int(self.lengths[number])
        end = size if length is None else min(size, offset + length)
        return self.tokens[start + offset : start + max(offset, end)]


def _read_index(path: Path) -> tuple["np.dtype[np.integer]", NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The dtype of the tokens, the lengths and byte offsets of sequences, and the ends of documents. Raises Unreadable."""
    with _open(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise Unreadable(f"{path} does not begin as an index of tokens does")
        _, version, code, num_sequences, num_ends = HEADER.unpack(head)
        if version != VERSION:
            raise Unreadable(f"{path} has version {version}, and only version {VERSION} is known")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            raise Unreadable(f"{path} says that its tokens have the dtype of code {code}, which is no integer")
        expected = HEADER.size + 12 * num_sequences + 8 * num_ends
        with_modes = expected + num_sequences  # one more byte for each sequence of multimodal data
        if size_bytes not in (expected, with_modes) or num_ends < 1:
            raise Unreadable(f"{path} has {size_bytes:,} bytes; its {num_sequences:,} sequences take {expected:,}")
        buffer = np.memmap(file, dtype=np.uint8, mode="r")
    lengths = buffer[HEADER.size :][: 4 * num_sequences].view("<i4")
    offsets = buffer[HEADER.size + 4 * num_sequences :][: 8 * num_sequences].view("<i8")
    ends = buffer[HEADER.size + 12 * num_sequences :][: 8 * num_ends].view("<i8")
    if ends[0] != 0 or ends[-1] != num_sequences or (np.diff(ends) < 0).any():
        raise Unreadable(f"{path} has documents that do not follow each other up to sequence {num_sequences:,}")
    return np.dtype(DTYPES[code]), lengths, offsets, ends


def _map(path: Path, dtype: "np.dtype[np.integer]") -> NDArray[np.integer]:
    with _open(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes % dtype.itemsize:
            raise Unreadable(f"{path} has {size_bytes:,} bytes, which are no tokens of {dtype.itemsize} bytes")
        return np.memmap(file, dtype=dtype, mode="r") if size_bytes else np.zeros(0, dtype)


def _open(path: Path) -> BufferedReader:
    try:
        return open_regular(path)
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from None
