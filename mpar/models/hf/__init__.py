"""Hugging Face folders: reading any slice of any leaf from safetensors, and writing folders that transformers can load."""

from mpar.models.hf._export import MAX_FILE_BYTES, QUANTISATION, compare_hf, hf_tensors, to_hf, write_hf
from mpar.models.hf._folder import DTYPES, INDEX, SINGLE, locate, open_weights, read_json
from mpar.models.hf._load import load_params, shard_slices
from mpar.models.hf._mapped_file import MappedFile
from mpar.models.hf._reader import HfReader
from mpar.models.hf._stored import stored_leaves
from mpar.models.hf._weight_map import StoredLeaf, map_leaves_to_stored

__all__ = [
    "DTYPES",
    "INDEX",
    "MAX_FILE_BYTES",
    "QUANTISATION",
    "SINGLE",
    "HfReader",
    "MappedFile",
    "StoredLeaf",
    "compare_hf",
    "hf_tensors",
    "load_params",
    "locate",
    "map_leaves_to_stored",
    "open_weights",
    "read_json",
    "shard_slices",
    "stored_leaves",
    "to_hf",
    "write_hf",
]
