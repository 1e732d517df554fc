"""The names of the strategies that mpar has. They are not in `mpar.strategy`, because that loads torch."""

__all__ = ["PRESET_NAMES"]

_STORAGE = ("ddp", "zero1", "zero2", "zero3", "hsdp")
PRESET_NAMES = (*(data + model for data in _STORAGE for model in ("", "_tp", "_tp_sp")), "tp", "tp_sp")
"""Every name that `mpar.strategy.preset` knows."""
