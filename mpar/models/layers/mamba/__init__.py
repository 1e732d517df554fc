"""The Mamba-2 mixer: its config, its parameters and their initial values, its function."""

from mpar.models.layers.mamba._config import MambaConfig
from mpar.models.layers.mamba._init import init_mamba_leaf
from mpar.models.layers.mamba._mamba import MAMBA_CARRIED_AXES, MambaState, decode_mamba, mamba, mamba_slice
from mpar.models.layers.mamba._params import MAMBA_AXES, Mamba, mamba_shapes
from mpar.models.layers.mamba._rows import MAMBA_ROWS_AXES, mamba_by_rows, mamba_rows_shapes

__all__ = [
    "MAMBA_AXES",
    "MAMBA_CARRIED_AXES",
    "MAMBA_ROWS_AXES",
    "Mamba",
    "MambaConfig",
    "MambaState",
    "decode_mamba",
    "init_mamba_leaf",
    "mamba",
    "mamba_by_rows",
    "mamba_rows_shapes",
    "mamba_shapes",
    "mamba_slice",
]
