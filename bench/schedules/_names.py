"""The names that torch and the peers have for schedules, and the bars for ratios on gloo."""

__all__ = ["FLOOR_BAR", "TORCH", "ZBV_BAR", "wall_bar"]

TORCH = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBV",
    "dual_pipe_v": "DualPipeV",
}
FLOOR_BAR = 1.05  # CPU seconds over those of the floor, for every schedule
ZBV_BAR = 0.95  # wall time of zbv over that of our 1F1B, on 2 ranks with 8 microbatches


def wall_bar(schedule: str, ranks: int) -> float | None:
    """The bar for mpar's wall time over torch's with the same schedule; None unless on 4 ranks."""
    if ranks != 4:
        return None
    return {"one_f_one_b": 0.97, "zb1p": 0.90, "zbv": 0.90, "dual_pipe_v": 0.90}.get(schedule)
