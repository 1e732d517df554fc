"""Checkpoints: safetensors, a JSON index of logical names, global shapes and offsets, and a JSON state. No pickle.

    <folder>/step_00000020/
        rank-00000.safetensors ...   the shards that each rank wrote; of several replicas only the first is written
        state.json                   the extras: step, data position, seed, config
        index.json                   for each tensor its global shape, dtype and shards (file, key, offsets, shape, CRC-32)

The folder gets this name once all of it is on the disk, so it is complete or absent.
"""

from mpar.checkpoint._folders import available, latest
from mpar.checkpoint._load import load, names, verify
from mpar.checkpoint._save import save
from mpar.checkpoint._state import Json, read_extras

__all__ = ["Json", "available", "latest", "load", "names", "read_extras", "save", "verify"]
