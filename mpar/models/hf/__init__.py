"""Hugging Face folders: reading any slice of any leaf from safetensors, and writing folders that transformers can load."""

from mpar.models.hf._export import MAX_FILE_BYTES, compare_hf, hf_tensors, to_hf, write_hf
from mpar.models.hf._folder import read_json
from mpar.models.hf._load import load_params, shard_slices
from mpar.models.hf._reader import HfReader
from mpar.models.hf._stored import stored_leaves

__all__ = [
    "MAX_FILE_BYTES",
    "HfReader",
    "compare_hf",
    "hf_tensors",
    "load_params",
    "read_json",
    "shard_slices",
    "stored_leaves",
    "to_hf",
    "write_hf",
]
