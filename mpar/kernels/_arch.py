"""Architecture: which chip a kernel is for, and what the chip has."""

from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A generation of NVIDIA GPUs. `shared_bytes`: how much shared memory one block may use (CUDA C programming guide, table of
    technical specifications per compute capability). `matrix`: the name of the chip's matrix instruction in SASS."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    matrix: str


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", (8, 0), 166_912, "HMMA"),
        Architecture("sm_90", (9, 0), 232_448, "HGMMA"),
        Architecture("sm_100", (10, 0), 232_448, "UTCHMMA"),
    )
}
"""The chips that table.yaml has entries for; on others the reference implementations run."""
