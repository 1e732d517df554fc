"""What a Mamba-2 mixer is made of: sizes, steps, biases; and what cannot be."""

from dataclasses import dataclass

from mpar.errors import ConfigError

__all__ = ["MambaConfig"]


@dataclass(frozen=True)
class MambaConfig:
    """Sizes of one mixer.

    num_heads, head_size: of the scan; their product is the inner size. num_groups: heads of a group share b and c.
    state_size: of each head's state, per element of the head. conv_width: tokens that the convolution sees.
    chunk:      tokens that are worked on at once; no part of the function.
    dt_limits:  the step, after softplus, is kept within them; None is no limit.
    dt_range, dt_floor: steps that fresh parameters begin with: log-uniform in the range, at least the floor.
    out_scale:  what the fresh projection out is multiplied by: where layers are many, residuals begin small.
    bias, conv_bias: whether the projections in and out, and the convolution, have biases.
    Raises ConfigError with all sizes that cannot be.
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
                f"dt_range={self.dt_range}, dt_floor={self.dt_floor}: steps are positive, the first not above the second"
            )
        if problems:
            raise ConfigError("cannot make a mamba layer:\n" + "\n".join(f"  {problem}" for problem in problems))
