"""Which checkpoints stay after a save."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOSS", "Keep"]

LOSS = "eval_loss"
"""The entry of the extras that `best` goes by."""


@dataclass(frozen=True)
class Keep:
    """last: the newest so many, None: all. every: for ever those of steps that it divides. best: so many of the lowest evaluation
    loss, which the extras have as "eval_loss"; of equals the newest. A checkpoint stays if one of the three keeps it."""

    last: int | None = None
    every: int | None = None
    best: int | None = None

    def problems(self) -> list[str]:
        """A line for each number that makes no sense."""
        named = (("keep", self.last), ("keep_every", self.every), ("keep_best", self.best))
        return [f"{name} must be at least 1, not {value}; None keeps all" for name, value in named[:1] if not _fine(value)] + [
            f"{name} must be at least 1, not {value}; None keeps none for it" for name, value in named[1:] if not _fine(value)
        ]

    def choose(self, steps: Mapping[Path, int], losses: Mapping[Path, float]) -> set[Path]:
        """Those of `steps` that stay. losses: of those that were evaluated."""
        newest = sorted(steps, key=lambda path: steps[path], reverse=True)
        kept = set(newest if self.last is None else newest[: self.last])
        if self.every is not None:
            kept |= {path for path, step in steps.items() if step % self.every == 0}
        if self.best is not None:
            kept |= set(sorted((path for path in newest if path in losses), key=lambda path: losses[path])[: self.best])
        return kept


def _fine(value: int | None) -> bool:
    return value is None or value >= 1
