"""AnswerLogps: a chain whose result is the log-probability of every answer, for what is computed once and kept."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mpar.chain import Segment
from mpar.models import LanguageHead
from mpar.tasks._chain import TaskChain
from mpar.tasks._pairs import answer_scores
from mpar.tasks._task import COLUMN, Forward

__all__ = ["AnswerLogps"]


@dataclass(frozen=True)
class _LogpsHead:
    """The function of the last segment: the sums that `answer_scores` gives."""

    head: LanguageHead
    ld_alpha: float | None

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        logps_BS = Forward(self.head, params, x, context).logps()
        return {"logps": answer_scores(logps_BS, context, self.ld_alpha).sums_BN}, {}


@dataclass(frozen=True)
class AnswerLogps(TaskChain):
    """The model of a task as a chain for `compile_forward`. Its result `logps` (B, N) is what a task with `reference_logps` in
    its batch compares with. Its batch is that of the task, without this entry."""

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Those of the model, and the log-probabilities of answers."""
        *body, last = self.base.segments
        fn = _LogpsHead(last.fn, getattr(self.task, "ld_alpha", None))  # type: ignore[arg-type]  # checked when made
        return (
            *(Segment(s.name, s.fn, s.paths, s.out_axes) for s in body),
            Segment(last.name, fn, last.paths, {"logps": COLUMN}),
        )
