"""Checkpoints as torch.distributed.checkpoint (DCP) has them, both ways, tensor by tensor.

DCP pickles its metadata. They are written by torch's own writer. They are read only when a caller names such a folder, by an
unpickler that makes nothing but the classes of such metadata; each tensor is read with `torch.load(weights_only=True)`.
"""

import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mpar.checkpoint._digest import block_digests, digest, shard_digest
from mpar.checkpoint._disk import make_folder, sync, write_file
from mpar.checkpoint._files import count_of, fill, is_name, open_regular, read_bounded
from mpar.checkpoint._index import INDEX_NAME, Entry, Index, index_text
from mpar.checkpoint._layout import DTYPES, Layout, Shard, dtype_name, file_name, layout
from mpar.checkpoint._reader import Reader
from mpar.checkpoint._slabs import bytes_of
from mpar.checkpoint._state import STATE_NAME, Json, json_problems, state_text
from mpar.errors import CheckpointError

__all__ = ["from_dcp", "to_dcp"]

_EXTRAS = "mpar.extras"
"""The name of the tensor of bytes that holds the extras as JSON: DCP would pickle a dict."""

_LARGEST_METADATA = 2**28
_METADATA = ".metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


def to_dcp(path: str | Path, out: str | Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Write the checkpoint at `path` as a DCP folder `out`, under the same names, with two tensors in memory at most.

    The extras are in a tensor of bytes, `mpar.extras`. `on_bytes` is told how many bytes were written. Raises CheckpointError if
    the checkpoint is damaged or `out` exists.
    """
    path, out = Path(path), Path(out)
    _check_absent(out)
    with Reader(path) as source:
        writer = dcp.FileSystemWriter(_partial(out), single_file_per_rank=False)  # it keeps all tensors of a file in memory
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
                dcp.save({}, storage_writer=writer, planner=_Planner(source, on_bytes), no_dist=True)
        except BaseException as error:
            shutil.rmtree(_partial(out), ignore_errors=True)
            raise _cause(error) from error
    _partial(out).rename(out)


def from_dcp(
    path: str | Path, out: str | Path, step: int | None = None, on_bytes: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Write the DCP folder `path` as the checkpoint `out`, under the same names, one tensor at a time, in three copies at most.

    step:  of the checkpoint; without it the one in the extras that `to_dcp` has stored, else 0.
    Returns the names of what is no tensor and was left out. Raises CheckpointError if the folder is damaged or no DCP checkpoint.
    """
    path, out = Path(path), Path(out)
    _check_absent(out)
    try:
        metadata = _read_metadata(path)
        tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, md.TensorStorageMetadata)}
        left_out = sorted(set(metadata.state_dict_metadata) - set(tensors))
        source = _Tensors(path, metadata, tensors, on_bytes)
        extras = _extras_of(source) if _EXTRAS in tensors else {}
        shards = {name: _shard(name, stored) for name, stored in tensors.items() if name != _EXTRAS}
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path} as a checkpoint of torch.distributed.checkpoint ({error})") from error
    stored_step = extras.get("step", 0)
    _write(out, step if step is not None else count_of(stored_step), shards, source, {**extras})
    return left_out


class _Planner(dcp.DefaultSavePlanner):
    """Plans to write every tensor of a checkpoint as one item, which is read when the writer asks for it."""

    def __init__(self, source: Reader, on_bytes: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False)
        self._source, self._on_bytes = source, on_bytes
        self._extras = torch.frombuffer(bytearray(json.dumps(source.extras).encode()), dtype=torch.uint8)

    def create_local_plan(self) -> SavePlan:
        """One item for each tensor, in their order."""
        sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in self._source.tensors.items()}
        sizes[_EXTRAS] = (tuple(self._extras.shape), torch.uint8)
        items = []
        for name, (shape, dtype) in sizes.items():
            size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
            chunk = md.ChunkStorageMetadata(offsets=offsets, sizes=size)
            data = TensorWriteData(chunk=chunk, properties=md.TensorProperties(dtype=dtype), size=size)
            items.append(WriteItem(md.MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        name = write_item.index.fqn
        if name == _EXTRAS:
            return self._extras
        tensor = self._source.read(name)
        self._on_bytes(tensor.nbytes)
        return tensor


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a DCP folder by name, each read when it is asked for."""

    def __init__(
        self, folder: Path, metadata: md.Metadata, stored: Mapping[str, md.TensorStorageMetadata], on_bytes: Callable[[int], None]
    ) -> None:
        self._folder, self._stored, self._on_bytes = folder, stored, on_bytes
        self._places = {(index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        if len(stored.chunks) == 1 and tuple(stored.chunks[0].sizes) == tuple(stored.size):
            return self._chunk(name, stored, stored.chunks[0])
        covered = torch.zeros(stored.size, dtype=torch.bool)
        out = torch.empty(stored.size, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            place = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if tuple(covered[place].shape) != tuple(chunk.sizes) or bool(covered[place].any()):
                raise CheckpointError(f"{self._folder}: the chunks of {name!r} overlap or leave its shape {tuple(stored.size)}")
            covered[place] = True
            out[place] = self._chunk(name, stored, chunk)
        if not bool(covered.all()):
            raise CheckpointError(f"{self._folder}: the chunks of {name!r} do not cover its shape {tuple(stored.size)}")
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _chunk(self, name: str, stored: md.TensorStorageMetadata, chunk: md.ChunkStorageMetadata) -> Tensor:
        place = self._places.get((name, tuple(chunk.offsets))) or self._places[(name, ())]
        if Path(place.relative_path).name != place.relative_path or getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{self._folder}: {name!r} is in a file that this code does not read, {place.relative_path!r}")
        file = self._folder / place.relative_path
        content = _part(file, count_of(place.offset), count_of(place.length))
        try:
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file}: the bytes of {name!r} are no tensor ({str(error)[:200]}); it is damaged") from error
        expected = tuple(chunk.sizes), stored.properties.dtype
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
            raise CheckpointError(f"{file}: {name!r} is not of the shape and dtype that the metadata say, {expected}")
        self._on_bytes(tensor.nbytes)
        return tensor.contiguous()


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only the classes of which DCP's metadata consist, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name. Raises CheckpointError for every other."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise CheckpointError(f"the metadata name {module}.{name}, which no metadata of DCP do; it was not run")


def _member(cls: Any, name: str) -> Any:
    """A member of the one enumeration in metadata: pickles of Python 3.11.3 and older name members by getattr."""
    if cls is md._MEM_FORMAT_ENCODING and name in cls.__members__:
        return cls[name]
    raise CheckpointError(f"the metadata ask for {name!r} of {cls!r}, which no metadata of DCP do; it was not run")


def _read_metadata(folder: Path) -> md.Metadata:
    file = folder / _METADATA
    content = read_bounded(file, _LARGEST_METADATA)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # whatever the bytes of a pickle can bring about
        raise CheckpointError(f"{file}: is not the metadata of a checkpoint ({error}); it is damaged") from error
    if not isinstance(metadata, md.Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file}: is not the metadata of a checkpoint; it is damaged")
    if any(not isinstance(place, filesystem._StorageInfo) for place in metadata.storage_data.values()):
        raise CheckpointError(f"{file}: is not of a checkpoint in a folder; it is damaged")
    return metadata


def _shard(name: str, stored: md.TensorStorageMetadata) -> Shard:
    dtype, shape = dtype_name(stored.properties.dtype), tuple(map(count_of, stored.size))
    if dtype not in DTYPES or not is_name(name):
        raise CheckpointError(f"cannot convert {name!r} of dtype {dtype}: use one of {', '.join(DTYPES)}, and a name without __")
    return Shard(shape, dtype, (0,) * len(shape), shape)


def _extras_of(source: _Tensors) -> dict[str, Json]:
    extras = json.loads(bytes(source[_EXTRAS].tolist()))
    if not isinstance(extras, dict) or json_problems(extras):
        raise CheckpointError(f"{_EXTRAS} does not hold the extras of a checkpoint")
    return extras


def _write(out: Path, step: int, shards: Mapping[str, Shard], tensors: Mapping[str, Tensor], extras: Mapping[str, Json]) -> None:
    """Write a checkpoint of one rank, whose tensors are read one at a time."""
    partial = _partial(out)
    make_folder(partial)
    try:
        sums: dict[str, bytes] = {}
        if shards:
            write_file(partial / file_name(0), _bytes_of_file(layout(step, {}, 0, shards), tensors, sums))
        state = state_text(step, {**extras, "step": step}).encode()
        entries = {
            name: Entry(shard.shape, shard.dtype, shard.shape, (0,), (shard_digest(sums[name]),))
            for name, shard in sorted(shards.items())
        }
        write_file(partial / STATE_NAME, [state])
        write_file(partial / INDEX_NAME, [index_text(Index(step, {}, len(state), digest(state).hex(), entries)).encode()])
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _bytes_of_file(planned: Layout, tensors: Mapping[str, Tensor], sums: dict[str, bytes]) -> Iterator[bytes | memoryview]:
    """The bytes of a rank's file in order; `sums` gets the checksums of the blocks of every tensor."""
    yield planned.header
    for name in planned.begins:
        view = bytes_of(tensors[name])
        sums[name] = block_digests(view)
        yield view
    yield b"".join(sums[name] for name in planned.checksums)


def _part(file: Path, offset: int, length: int) -> bytes:
    descriptor = open_regular(file)
    try:
        if offset + length > os.fstat(descriptor).st_size:
            raise CheckpointError(f"{file}: ends before byte {offset + length}; it is truncated")
        content = bytearray(length)
        fill(descriptor, file, memoryview(content), offset)
        return bytes(content)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> BaseException:
    """Our own error, if DCP has wrapped one in its own."""
    failures = error.failures.values() if isinstance(error, dcp.CheckpointException) else ()
    return next((failure for failure, *_ in failures if isinstance(failure, CheckpointError)), error)


def _check_absent(out: Path) -> None:
    for path in (out, _partial(out)):
        if path.exists():
            raise CheckpointError(f"cannot write {out}: {path} exists. Choose another folder, or delete it.")


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")
