"""Predicted: the time of the step of one row, as mpar's program of it is predicted."""

from dataclasses import dataclass, replace

from bench.predict._rows import Row
from mpar import models
from mpar.mesh import Mesh
from mpar.models import flops_per_token
from mpar.optim import AdamW
from mpar.program import Prediction
from mpar.program.compile import compile_step

__all__ = ["Judged", "judge", "published_s"]


@dataclass(frozen=True)
class Judged:
    """A row, seconds of its step as published and as predicted, and the share of the predicted time that is exposed or bubble."""

    row: Row
    published_s: float
    predicted_s: float
    exposed: float
    bubble: float

    @property
    def error(self) -> float:
        """By what share of the published time the predicted one is longer."""
        return self.predicted_s / self.published_s - 1


def judge(row: Row) -> Judged:
    """Compile the program of a row and predict its time. Recomputing half is halfway between all and nothing but cheap ops."""
    kinds = ("selective", "full") if row.recompute == "half" else (row.recompute,)
    told = [_predicted(replace(row, recompute=kind)) for kind in kinds]
    step, exposed, bubble = (sum(values) / len(told) for values in zip(*map(_times, told), strict=True))
    return Judged(row, published_s(row), step, exposed / step, bubble / step)


def _times(prediction: Prediction) -> tuple[float, float, float]:
    assert prediction.step_s is not None and prediction.exposed_s is not None and prediction.bubble_s is not None
    return prediction.step_s, prediction.exposed_s, prediction.bubble_s


def _predicted(row: Row) -> Prediction:
    """The prediction for a row's step in bfloat16, with masters in float32 and AdamW."""
    program = compile_step(
        models.from_config(row.config),
        AdamW(lr=1e-4),
        Mesh(**row.mesh),
        row.made_strategy(),
        (row.batch, row.seq_len),
        schedule=row.made_schedule(),
        num_microbatches=row.num_microbatches,
        precision="bf16",
        recompute=row.recompute,
        hardware=row.profile(),
    )
    return program.predict(row.profile())


def published_s(row: Row) -> float:
    """Seconds of one step, as published or computed from what was published."""
    if row.seconds is not None:
        return row.seconds
    tokens = row.batch * row.seq_len / row.num_ranks
    if row.tokens_per_s is not None:
        return tokens / row.tokens_per_s
    assert row.mfu is not None
    flops = flops_per_token(models.from_config(row.config), row.seq_len, causal=False) * tokens
    return flops / (row.mfu * row.profile().peak_flops_per_s)
