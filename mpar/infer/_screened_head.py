"""Screened head: the screen of the output matrix that a runner keeps beside it, for steps of rows that are all greedy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar import tree
from mpar.infer._tables import Tables
from mpar.mesh import Mesh
from mpar.models import SCREEN, CacheSizes, DeclaredModel, Trainable, can_screen, with_cache
from mpar.ops import MAX_SCREENED_ROWS, Screen, few_rows_read_columns, fill_screen, screens_logits
from mpar.precision import Precision
from mpar.strategy import Strategy

__all__ = ["ScreenedHead", "screened_head"]

_MOST_IN_VAIN, _LOOKED_AT = 16, 61
"""After so many steps in vain a screen is not used any more; one logit of so many is looked at."""


class ScreenedHead:
    """The screen of a model in the state of a runner. It is made when a step first needs it, and anew for other parameters."""

    def __init__(self, model: DeclaredModel) -> None:
        self.model = model
        self.forget()

    def forget(self) -> None:
        """There are other parameters."""
        self._is_made, self._in_vain = False, 0

    def not_made(self, sizes: CacheSizes) -> dict[str, Tensor]:
        """The screen by path before it is made: rows that are no tokens are marked."""
        screen = tree.get(with_cache(self.model, sizes, screened=True).abstract_params, SCREEN)
        parts = {f"{SCREEN}.{path}": torch.zeros(x.shape, dtype=x.dtype) for path, x in tree.leaves_with_path(screen)}
        parts[f"{SCREEN}.errors"].view(torch.float32)[self.model.vocab_size :] = torch.nan
        return parts

    def greedy(self, tables: Tables, num_rows: int, leaves: Mapping[str, Tensor]) -> Tensor:
        """Which rows of a step are greedy, for a program that multiplies `num_rows`: all, or none where the screen is of no use.
        leaves: those of the state, in which the screen is made if the step needs it."""
        is_of_use = bool(tables.greedy_R.all()) and num_rows <= MAX_SCREENED_ROWS and self._in_vain < _MOST_IN_VAIN
        if is_of_use and not self._is_made and (tables.last_R >= 0).any():
            self._is_made = self._make(leaves)
        return tables.greedy_R & (is_of_use and self._is_made)

    def note(self, logits_RV: Tensor, greedy_R: Tensor) -> None:
        """Take notice of the logits of a step. If all were computed in many steps, which takes longer than without a screen, it
        is not used any more for these parameters."""
        if greedy_R.all():
            self._in_vain = 0 if logits_RV[:, ::_LOOKED_AT].isneginf().any() else self._in_vain + 1

    def _make(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether programs can use the screen, which is made from the output matrix. A rank without that has no screen either."""
        parts = [f"params.{SCREEN}.{part}" for part in ("codes", "absmax", "errors")]
        if parts[0] not in leaves:
            return True
        weight = leaves[f"params.{self.model.head_path}"]
        w_VD = weight if self.model.config.tied else weight.t()
        if w_VD.stride(1) != 1:  # as it came by `load`
            return False
        fill_screen(Screen(*(leaves[part] for part in parts)), w_VD)
        return True


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
