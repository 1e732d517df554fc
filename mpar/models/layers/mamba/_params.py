"""The parameters of a Mamba-2 mixer: what they are, their logical axes, their shapes."""

from typing import Generic

from mpar.chain import Axes
from mpar.models.layers._sizes import Sizes
from mpar.models.layers.mamba._config import MambaConfig
from mpar.tree import Leaf, struct

__all__ = ["MAMBA_AXES", "Mamba", "mamba_shapes"]


@struct
class Mamba(Generic[Leaf]):
    """Parameters. z is the gate; b, c and x go through the convolution (W taps); dt is a time step for each head.

    The decay of a head is exp(-dt exp(a_log)). C is the inner size, N * H. K is the size of a state, per element of a head.
    """

    z_DNH: Leaf
    x_DNH: Leaf
    b_DGK: Leaf
    c_DGK: Leaf
    dt_DN: Leaf
    conv_x_NHW: Leaf
    conv_b_GKW: Leaf
    conv_c_GKW: Leaf
    dt_bias_N: Leaf
    a_log_N: Leaf
    skip_N: Leaf
    norm_C: Leaf
    out_NHD: Leaf
    conv_x_bias_NH: Leaf | None = None
    conv_b_bias_GK: Leaf | None = None
    conv_c_bias_GK: Leaf | None = None
    z_bias_NH: Leaf | None = None
    x_bias_NH: Leaf | None = None
    b_bias_GK: Leaf | None = None
    c_bias_GK: Leaf | None = None
    dt_in_bias_N: Leaf | None = None
    out_bias_D: Leaf | None = None


MAMBA_AXES: Mamba[Axes] = Mamba(
    z_DNH=("embed", "heads", "head"),
    x_DNH=("embed", "heads", "head"),
    b_DGK=("embed", "kv_heads", None),
    c_DGK=("embed", "kv_heads", None),
    dt_DN=("embed", "heads"),
    conv_x_NHW=("heads", "head", None),
    conv_b_GKW=("kv_heads", None, None),
    conv_c_GKW=("kv_heads", None, None),
    dt_bias_N=("heads",),
    a_log_N=("heads",),
    skip_N=("heads",),
    norm_C=("heads",),  # one dim, as other gains have, so that the optimizer does not decay it
    out_NHD=("heads", "head", "embed"),
    conv_x_bias_NH=("heads", "head"),
    conv_b_bias_GK=("kv_heads", None),
    conv_c_bias_GK=("kv_heads", None),
    z_bias_NH=("heads", "head"),
    x_bias_NH=("heads", "head"),
    b_bias_GK=("kv_heads", None),
    c_bias_GK=("kv_heads", None),
    dt_in_bias_N=("heads",),
    out_bias_D=("embed",),
)


def mamba_shapes(config: MambaConfig, hidden_size: int) -> Mamba[Sizes]:
    """The parameters with a tuple of sizes for each leaf."""
    D, N, H, G, K, W = hidden_size, config.num_heads, config.head_size, config.num_groups, config.state_size, config.conv_width
    return Mamba(
        z_DNH=(D, N, H),
        x_DNH=(D, N, H),
        b_DGK=(D, G, K),
        c_DGK=(D, G, K),
        dt_DN=(D, N),
        conv_x_NHW=(N, H, W),
        conv_b_GKW=(G, K, W),
        conv_c_GKW=(G, K, W),
        dt_bias_N=(N,),
        a_log_N=(N,),
        skip_N=(N,),
        norm_C=(N * H,),
        out_NHD=(N, H, D),
        conv_x_bias_NH=(N, H) if config.conv_bias else None,
        conv_b_bias_GK=(G, K) if config.conv_bias else None,
        conv_c_bias_GK=(G, K) if config.conv_bias else None,
        z_bias_NH=(N, H) if config.bias else None,
        x_bias_NH=(N, H) if config.bias else None,
        b_bias_GK=(G, K) if config.bias else None,
        c_bias_GK=(G, K) if config.bias else None,
        dt_in_bias_N=(N,) if config.bias else None,
        out_bias_D=(D,) if config.bias else None,
    )
