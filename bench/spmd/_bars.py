"""The bars: the lower end of a ratio's interval must be under its bar."""

__all__ = ["BARS"]

BARS: dict[tuple[str, str, str], float] = {
    ("nano", "tp4+sp", "torch"): 0.35,
    ("nano", "fsdp2xtp2+sp", "torch"): 0.42,
    ("nano", "tp2+sp", "torch"): 0.45,
    ("nano", "fsdp4", "torch"): 0.55,
    ("nano", "tp2", "torch"): 0.65,
    ("nano", "dp4", "torch"): 1.0,
    ("tiny", "tp4+sp", "torch"): 0.62,
    ("tiny", "fsdp2xtp2+sp", "torch"): 0.62,
    ("tiny", "tp2+sp", "torch"): 0.80,
    ("tiny", "tp2", "torch"): 0.85,
    ("tiny", "fsdp4", "torch"): 0.82,
    ("tiny", "dp4", "torch"): 1.02,
    ("small", "fsdp4", "torch"): 0.80,
    ("nano", "tp4+sp", "titan_spmd_types"): 0.65,
    ("tiny", "tp4+sp", "titan_spmd_types"): 0.82,
    ("tiny", "one", "transformers"): 0.95,
}
"""For each (config, mesh, peer) the largest allowed ratio mpar / peer."""
