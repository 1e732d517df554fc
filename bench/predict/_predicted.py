"""Predicted: the time of the step of one row, as mpar's program of it is predicted."""

from bench.predict._rows import Row
from mpar import models
from mpar.models import flops_per_token
from mpar.optim import AdamW
from mpar.mesh import Mesh
from mpar.program import Prediction, Program
from mpar.program.compile import compile_step

__all__ = ["compiled", "error", "published_s"]


def compiled(row: Row) -> Program:
    """The program of a row's step, in bfloat16 with float32 masters and AdamW."""
    return compile_step(
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


def error(row: Row, prediction: Prediction) -> float:
    """By what share of the published time the predicted one is longer."""
    assert prediction.step_s is not None
    return prediction.step_s / published_s(row) - 1
