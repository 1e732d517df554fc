"""A safetensors file that is filled tensor by tensor. The format's library writes only tensors that are all in memory at once.

The format is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors, section "Format").
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpar.errors import CheckpointError
from mpar.models.hf._folder import DTYPES

__all__ = ["MappedFile"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class MappedFile:
    """A new file with a place for every tensor. `tensors` are these places, mapped into memory: what is copied to them is in the
    file, and pages that the system needs for other things go to the disk. notes: what its header says besides the format.

    Raises CheckpointError if there is no room for the file.
    """

    def __init__(
        self, file: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], notes: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(notes or {})}}
        position, places = 0, {}
        for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):  # keeps all places aligned
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
            places[name] = (position, position + size)
            position += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        try:
            with file.open("xb") as opened:
                os.posix_fallocate(opened.fileno(), 0, begin + position)  # writing to a mapped page without room kills a process
                opened.write(len(text).to_bytes(8, "little") + text)
        except OSError as error:
            raise CheckpointError(f"cannot write {file} of {begin + position} bytes: {error.strerror}") from error
        self._map = np.memmap(file, np.uint8, "r+")
        data = torch.from_numpy(self._map)[begin:]
        self.tensors: dict[str, Tensor] = {
            name: data[first:last].view(shapes[name][1]).view(shapes[name][0]) for name, (first, last) in places.items()
        }

    def sync(self) -> None:
        """Return when all that was copied to the tensors is on the disk."""
        self._map.flush()
