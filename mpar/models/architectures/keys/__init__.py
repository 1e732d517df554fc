"""Keys: how the entries of a Hugging Face config.json are read and checked, and with which errors they are refused."""

from mpar.models.architectures.keys._common import COMMON_KEYS, IGNORED_KEYS
from mpar.models.architectures.keys._experts import EXPERT_KEYS, aux_loss, expert_names, num_experts, sparse_layers
from mpar.models.architectures.keys._key import NUMBER, REQUIRED, Key, Values, is_number, read_config, refusal
from mpar.models.architectures.keys._rope import read_rope
from mpar.models.architectures.keys._windows import WINDOW_KEYS, read_windows, windows_of

__all__ = [
    "COMMON_KEYS",
    "EXPERT_KEYS",
    "IGNORED_KEYS",
    "NUMBER",
    "REQUIRED",
    "WINDOW_KEYS",
    "Key",
    "Values",
    "aux_loss",
    "expert_names",
    "is_number",
    "num_experts",
    "read_config",
    "read_rope",
    "read_windows",
    "refusal",
    "sparse_layers",
    "windows_of",
]
