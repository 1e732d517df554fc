"""Checkpoints: safetensors, a JSON index of logical names, global shapes and offsets, and a JSON state. No pickle.

    <folder>/step_00000020/
        rank-00000.safetensors ...   the shards that each rank wrote, each 128 KiB with a checksum; of replicas the first writes
        state.json                   the extras: step, data position, seed, config
        index.json                   for each tensor its shape, dtype and blocks (rank, checksum); the checksum of state.json

The folder gets this name once all of it is on the disk, so it is complete or absent.
"""

from mpar.checkpoint._compare import TensorDifference, extras_differences, norm, tensor_difference
from mpar.checkpoint._damaged import latest, move_aside, move_damaged_aside
from mpar.checkpoint._folders import available, named
from mpar.checkpoint._keep import LOSS, Keep
from mpar.checkpoint._load import load, names, verify
from mpar.checkpoint._reader import Reader, StoredTensor
from mpar.checkpoint._save import save
from mpar.checkpoint._saver import Leaf, SaveOptions, Saver
from mpar.checkpoint._state import Json, read_extras

__all__ = [
    "LOSS",
    "Json",
    "Keep",
    "Leaf",
    "Reader",
    "SaveOptions",
    "Saver",
    "StoredTensor",
    "TensorDifference",
    "available",
    "extras_differences",
    "latest",
    "load",
    "move_aside",
    "move_damaged_aside",
    "named",
    "names",
    "norm",
    "read_extras",
    "save",
    "tensor_difference",
    "verify",
]
