"""Writes Megatron's indexed files, byte for byte as Megatron does."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mpar.data.megatron._indexed import DTYPES, HEADER, MAGIC, VERSION
from mpar.errors import DataError

__all__ = ["IndexedWriter"]


class IndexedWriter:
    """A context that writes documents, each of which has any number of sequences, into `prefix.bin` and `prefix.idx`.

    The files get their names only when the context ends without an error: until then, no file of these names changes.
    Raises DataError if a token does not fit `dtype`, or a file cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: "np.dtype[np.integer]") -> None:
        self._prefix, self._dtype = os.fspath(prefix), np.dtype(dtype).newbyteorder("<")
        self._drafts = {suffix: Path(f"{self._prefix}.{suffix}.{os.getpid()}.part") for suffix in ("bin", "idx")}
        self._lengths: list[NDArray[np.int32]] = []
        self._ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self.num_tokens = 0

    def __enter__(self) -> "IndexedWriter":
        try:
            self._drafts["bin"].parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._drafts["bin"], "wb")  # closed by __exit__
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def add(self, tokens: NDArray[np.integer], lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Add documents.

        tokens:    the tokens of all their sequences, one after the other.
        lengths:   the number of tokens of each sequence, at least 1.
        sequences: the number of sequences of each document; 0 for a document without a token.
        """
        limits = np.iinfo(self._dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise DataError(
                f"cannot write tokens from {tokens.min()} to {tokens.max()} into {self._prefix}.bin: its dtype "
                f"{self._dtype.name} holds {limits.min} to {limits.max}.\n"
                "The dtype follows from the size of the vocabulary; give that of the tokenizer."
            )
        assert sum(lengths) == len(tokens) and sum(sequences) == len(lengths)
        try:
            tokens.astype(self._dtype, copy=False).tofile(self._bin)
        except OSError as error:
            raise self._unwritable(error) from None
        self._lengths.append(np.asarray(lengths, "<i4"))
        self._ends.append(self._ends[-1][-1] + np.cumsum(sequences, dtype=np.int64))
        self._ends = self._ends if len(sequences) else self._ends[:-1]
        self.num_tokens += len(tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bin.close()
        try:
            if kind is None:
                self._write_index()
                for suffix, draft in self._drafts.items():
                    os.replace(draft, f"{self._prefix}.{suffix}")
        except OSError as problem:
            raise self._unwritable(problem) from None
        finally:
            for draft in self._drafts.values():
                draft.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
        ends = np.concatenate(self._ends).astype("<i8")
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        with open(self._drafts["idx"], "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(ends)))
            for array in (lengths, offsets.astype("<i8"), ends):
                array.tofile(file)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write {self._prefix}.bin and .idx: {error.strerror or error}. Choose another place with room for them."
        )
