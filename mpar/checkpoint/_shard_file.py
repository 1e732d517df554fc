"""Reads the file of one rank. Every block was summed when it was written, and is compared as it is read.

The reader of safetensors compares nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mpar.checkpoint._digest import block_digests, shard_digest
from mpar.checkpoint._files import OpenFile, fill
from mpar.checkpoint._index import Written
from mpar.checkpoint._layout import BLOCK_BYTES, CHECKSUM_BYTES, Box, Layout, num_blocks
from mpar.checkpoint._slabs import AT_ONCE_BYTES, copy_box
from mpar.errors import CheckpointError

__all__ = ["ShardFile"]


class ShardFile(OpenFile):
    """The file of one rank, open for reading.

    planned:  where everything must be.
    shards:   what it holds, by the name of the tensor, as the index has it.

    Raises CheckpointError, which names the file, if it is no regular file, or has another size or header than planned.
    """

    def __init__(self, file: Path, planned: Layout, shards: Mapping[str, Written]) -> None:
        super().__init__(file)
        self._planned, self._shards = planned, shards
        try:
            self._check_header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, box: Box, target: Tensor) -> None:
        """Fill `target`, on the CPU and of the tensor's dtype, with the block `box` of the shard of tensor `name`.

        Every block of the file that overlaps `box` is read once, whole, and compared with its checksum, which itself is bound to
        the index. Raises CheckpointError if one does not fit; then `target` is partly filled.
        """
        shard = self._shards[name].shard
        blocks = _Blocks(self, name, shard.num_bytes, self._block_digests_of(name, shard.num_bytes))
        copy_box(shard.shape, box, target, blocks.fill)

    def fill(self, view: memoryview, begin: int) -> None:
        """Read from byte `begin` of the file on until `view` is full. Nothing is compared."""
        fill(self._descriptor, self._file, view, begin)

    def damaged(self, name: str) -> CheckpointError:
        """The error that says that the bytes of a shard are not those that were written."""
        return CheckpointError(f"{self._file}: the bytes of {name!r} do not fit their checksum; the file is damaged")

    def begin(self, name: str) -> int:
        """The position of the first byte of the shard of tensor `name`."""
        return self._planned.begins[name]

    def _check_header(self) -> None:
        planned, size = self._planned, os.fstat(self._descriptor).st_size
        if size != planned.size:
            raise CheckpointError(f"{self._file}: has {size} bytes, the index says {planned.size}; it is truncated or damaged")
        header = bytearray(len(planned.header))
        self.fill(memoryview(header), 0)
        if header != planned.header:
            raise CheckpointError(
                f"{self._file}: its header is not the one that follows from the index; it is damaged, or of another checkpoint"
            )

    def _block_digests_of(self, name: str, size: int) -> bytes:
        sums = bytearray(num_blocks(size) * CHECKSUM_BYTES)
        self.fill(memoryview(sums), self._planned.checksums[name])
        if shard_digest(bytes(sums)) != self._shards[name].checksum:
            raise CheckpointError(
                f"{self._file}: the checksums of {name!r} are not those that the index binds; "
                "the file is damaged, or of another checkpoint"
            )
        return bytes(sums)


class _Blocks:
    """The bytes of a shard, read in whole blocks that are compared. The last block that was read in part is kept, so that reads
    in ascending order read no block twice."""

    def __init__(self, source: ShardFile, name: str, size: int, sums: bytes) -> None:
        self._source, self._name, self._size, self._sums = source, name, size, sums
        self._kept, self._kept_number = memoryview(b""), -1

    def fill(self, view: memoryview, begin: int) -> None:
        """Fill `view` with the bytes of the shard from byte `begin` on."""
        while view:
            number, inside = divmod(begin, BLOCK_BYTES)
            whole = self._whole_blocks(begin, len(view)) if inside == 0 else 0
            if whole and number != self._kept_number:
                count = min(whole, AT_ONCE_BYTES)
                self._read(view[:count], number)
            else:
                block = self._block(number)
                count = min(len(block) - inside, len(view))
                view[:count] = block[inside : inside + count]
            view, begin = view[count:], begin + count

    def _whole_blocks(self, begin: int, wanted: int) -> int:
        """How many bytes from `begin` on are whole blocks, the last of the shard among them."""
        return wanted if begin + wanted == self._size else wanted - wanted % BLOCK_BYTES

    def _block(self, number: int) -> memoryview:
        if number != self._kept_number:
            block = memoryview(bytearray(min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)))
            self._read(block, number)
            self._kept, self._kept_number = block, number
        return self._kept

    def _read(self, view: memoryview, number: int) -> None:
        """Fill `view` with whole blocks from block `number` on, and compare them."""
        self._source.fill(view, self._source.begin(self._name) + number * BLOCK_BYTES)
        first = number * CHECKSUM_BYTES
        sums = block_digests(view)
        if sums != self._sums[first : first + len(sums)]:
            raise self._source.damaged(self._name)
