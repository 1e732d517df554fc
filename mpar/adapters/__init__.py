"""Adapters: small matrices beside the weights of a model, which are trained in the place of these.

`add` makes of a model another one with a larger tree of parameters, whose own parameters are frozen; all that compiles, proves
and predicts a model does so for it. `merge` and `unmerge` add adapters to the weights and take them away again; `write_peft` and
`read_peft` exchange folders with PEFT.
"""

from mpar.adapters._bank import AdapterBank, bank_of
from mpar.adapters._bank_folders import BankReader
from mpar.adapters._folder import AdapterReader, read_lora, read_peft, write_peft
from mpar.adapters._leaves import ADAPTERS
from mpar.adapters._lora import LoRA
from mpar.adapters._low_rank import Factor, LowRank
from mpar.adapters._merge import can_merge, merge, merged_leaf, unmerge
from mpar.adapters._model import AdaptedModel, add, base_params, first_params
from mpar.adapters._targets import Adapted, adapted_matrices

__all__ = [
    "ADAPTERS",
    "Adapted",
    "AdaptedModel",
    "AdapterBank",
    "AdapterReader",
    "BankReader",
    "Factor",
    "LoRA",
    "LowRank",
    "adapted_matrices",
    "add",
    "bank_of",
    "base_params",
    "can_merge",
    "first_params",
    "merge",
    "merged_leaf",
    "read_lora",
    "read_peft",
    "unmerge",
    "write_peft",
]
