"""Screened head: the screen of the output matrix that a runner keeps beside it, for steps of rows that are all greedy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar import tree
from mpar.mesh import Mesh
from mpar.models import SCREEN, CacheSizes, DeclaredModel, Trainable, can_screen, with_cache
from mpar.ops import Screen, few_rows_read_columns, fill_screen, screens_logits
from mpar.precision import Precision
from mpar.strategy import Strategy

__all__ = ["ScreenedHead", "screened_head"]


class ScreenedHead:
    """The screen of a model in the state of a runner. It is made when a step first needs it, and anew for other parameters."""

    def __init__(self, model: DeclaredModel) -> None:
        self.model, self.is_made = model, False

    def not_made(self, sizes: CacheSizes) -> dict[str, Tensor]:
        """The screen by path before it is made. Of rows that are no tokens, nothing may follow for others."""
        screen = tree.get(with_cache(self.model, sizes, screened=True).abstract_params, SCREEN)
        parts = {f"{SCREEN}.{path}": torch.zeros(x.shape, dtype=x.dtype) for path, x in tree.leaves_with_path(screen)}
        parts[f"{SCREEN}.errors"].view(torch.float32)[self.model.vocab_size :] = torch.inf
        return parts

    def make(self, leaves: Mapping[str, Tensor]) -> None:
        """Make the screen from the output matrix, if that was not done yet. leaves: those of the state; a rank that has no output
        matrix has no screen."""
        path = f"params.{self.model.head_path}"
        if not self.is_made and path in leaves:
            w_VD = leaves[path] if self.model.config.tied else leaves[path].t()
            parts = [leaves[f"params.{SCREEN}.{part}"] for part in ("codes", "absmax", "errors")]
            fill_screen(Screen(*parts), w_VD)
        self.is_made = True


def screened_head(
    model: Trainable, mesh: Mesh, strategy: Strategy, precision: Precision, device: torch.device
) -> ScreenedHead | None:
    """The screen for a runner; None where it is of no use: without a kernel, or if the output matrix is another one than
    that which is stored."""
    if device.type != "cpu" or not isinstance(model, DeclaredModel) or not can_screen(model):
        return None
    path, axes = model.head_path, tree.get(model.param_axes, model.head_path)
    dtype, compute = tree.get(model.abstract_params, path).dtype, strategy.compute_spec(axes, mesh)
    is_stored = strategy.storage_spec(axes, "param", mesh) == compute and precision.compute_dtype(path, dtype) == dtype
    has_rows = not strategy.compute_spec(("embed",), mesh).axes
    return ScreenedHead(model) if is_stored and has_rows and few_rows_read_columns(dtype) and screens_logits(dtype) else None
