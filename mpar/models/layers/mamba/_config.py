"""The config of a Mamba-2 mixer: sizes, time steps, biases; and the check of its values."""

from dataclasses import dataclass

from mpar.errors import ConfigError

__all__ = ["MambaConfig"]


@dataclass(frozen=True)
class MambaConfig:
    """Sizes of one mixer.

    num_heads, head_size: heads of the scan and their size; the product is the inner size.
    num_groups: number of groups of heads; the heads of a group share b and c.
    state_size: numbers of state per element of a head.
    conv_width: how many tokens the convolution sees.
    chunk:      how many tokens are computed at once; it does not change the function.
    dt_limits:  the time step dt, after softplus, is clamped to these limits; None is no limit.
    dt_range, dt_floor: initial time steps are log-uniform in the range, but at least the floor.
    out_scale:  what the initial output projection is multiplied by; models of many layers make it small.
    bias, conv_bias: whether the projections, and whether the convolution, have biases.
    Raises ConfigError with everything that is impossible.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    chunk: int = 256
    dt_limits: tuple[float | None, float | None] = (None, None)
    dt_range: tuple[float, float] = (0.001, 0.1)
    dt_floor: float = 1e-4
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float = 1e-5
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        names = ("num_heads", "head_size", "num_groups", "state_size", "conv_width", "chunk")
        problems = [f"{name}={getattr(self, name)}: must be a positive int" for name in names if getattr(self, name) < 1]
        if not problems and self.num_heads % self.num_groups:
            problems.append(f"num_groups={self.num_groups} does not divide num_heads={self.num_heads}")
        low, high = self.dt_limits
        if low is not None and high is not None and not low <= high:
            problems.append(f"dt_limits={self.dt_limits}: the first must not exceed the second")
        if not 0 < self.dt_range[0] <= self.dt_range[1] or not self.dt_floor > 0:
            problems.append(
                f"dt_range={self.dt_range}, dt_floor={self.dt_floor}: all must be positive, and the range must not be descending"
            )
        if problems:
            raise ConfigError("cannot make a mamba layer:\n" + "\n".join(f"  {problem}" for problem in problems))
