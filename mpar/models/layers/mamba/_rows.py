"""The Mamba-2 mixer for tokens of many rows, each of which goes on from the state of its row."""

from collections.abc import Mapping

from torch import Tensor

from mpar.chain import Axes
from mpar.models.layers._cache import CacheSizes
from mpar.models.layers._sizes import Sizes
from mpar.models.layers.mamba._config import MambaConfig
from mpar.models.layers.mamba._mamba import MAMBA_CARRIED_AXES, MambaState, run_by_rows
from mpar.models.layers.mamba._params import Mamba

__all__ = ["MAMBA_ROWS_AXES", "mamba_by_rows", "mamba_rows_shapes"]


def _of_rows(axes: Axes) -> Axes:
    """The axes of the state of all rows, from those of one state per row of a batch."""
    return (axes[0], None, *axes[1:])


MAMBA_ROWS_AXES: MambaState[Axes] = MambaState(
    _of_rows(MAMBA_CARRIED_AXES.conv_x_BTNH),
    _of_rows(MAMBA_CARRIED_AXES.conv_b_BTGK),
    _of_rows(MAMBA_CARRIED_AXES.conv_c_BTGK),
    _of_rows(MAMBA_CARRIED_AXES.scan_BNHK),
)


def mamba_rows_shapes(config: MambaConfig, sizes: CacheSizes) -> MambaState[Sizes]:
    """The states of all rows with a tuple of sizes for each leaf; the second dim is that of rows."""
    rows, kept = (sizes.groups, sizes.rows), config.conv_width - 1
    heads, groups = (config.num_heads, config.head_size), (config.num_groups, config.state_size)
    return MambaState((*rows, kept, *heads), (*rows, kept, *groups), (*rows, kept, *groups), (*rows, *heads, config.state_size))


def mamba_by_rows(
    params: Mamba[Tensor],
    config: MambaConfig,
    x_BTD: Tensor,
    context: Mapping[str, Tensor],
    cache: MambaState[Tensor],
    sizes: CacheSizes,
) -> tuple[Tensor, MambaState[Tensor]]:
    """`mamba` for tokens whose rows have states, and the states after them. `context` has for each token its row ("documents")
    and its position ("positions"); at position 0 a row begins anew."""
    return run_by_rows(params, config, x_BTD, cache, context["documents"], context["positions"])
