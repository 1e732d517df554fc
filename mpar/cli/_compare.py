"""`mpar plan compare=[...]`: schedules for the same model and mesh side by side, each compiled, verified and predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from mpar.errors import ConfigError, ShapeError, ShardingError, UnknownNameError
from mpar.program import Hardware, Prediction, format_bytes, format_time
from mpar.schedules import SCHEDULES, Picture, num_stages
from mpar.train import RunSetup
from mpar.train.compile import compile_program

__all__ = ["Candidate", "check_names", "comparison", "try_schedules"]


@dataclass(frozen=True)
class Candidate:
    """One schedule with its prediction, or with the reason why it cannot run with this model and mesh."""

    name: str
    reason: str = ""
    num_stages: int = 0
    tokens: int = 0
    fits: bool = False
    prediction: Prediction | None = None
    picture: Picture | None = None

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        assert self.prediction is not None and self.prediction.step_s is not None
        return self.prediction.step_s


def check_names(names: Sequence[str]) -> None:
    """Raise UnknownNameError if any name is no schedule; the error lists all that are none."""
    known = (*(name for name in SCHEDULES if name != "forward_only"), "auto")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownNameError(f"cannot compare {', '.join(unknown)}: no such schedule; there are {', '.join(known)}")


def try_schedules(setup: RunSetup, names: Sequence[str], *, pictures: bool) -> list[Candidate]:
    """Compile the model of `setup` for each schedule. Its `options`, `num_chunks`, and a layout that counts layers are used only
    for the schedule that is configured.
    """
    return [_try(setup, name, pictures) for name in dict.fromkeys(names)]


def _try(setup: RunSetup, name: str, pictures: bool) -> Candidate:
    config, hardware = setup.config, setup.hardware
    group = replace(config.schedule, name=name, table=None)
    if name != config.schedule.name:
        layout = group.layout if group.layout in (None, "balance") else None  # any other layout fixes the number of stages
        group = replace(group, num_chunks=None, options={}, layout=layout)
    try:
        program = compile_program(replace(setup, config=replace(config, schedule=group)))
    except (ConfigError, ShapeError, ShardingError) as error:  # any other error is a fault of mpar, not of the request
        return Candidate(name, str(error).splitlines()[0])
    prediction = program.predict(hardware)
    batch, length = program.facts.batch["tokens"]
    return Candidate(
        name,
        num_stages=num_stages(program.schedule),
        tokens=batch * program.num_microbatches * length,
        fits=prediction.need_bytes <= hardware.memory_bytes,
        prediction=prediction,
        picture=program.picture(hardware, name) if pictures else None,
    )


def comparison(candidates: Sequence[Candidate], hardware: Hardware) -> Table:
    """A row for each schedule. The shortest step is marked as best, among the schedules that fit into memory if any do."""
    running = [candidate for candidate in candidates if candidate.prediction is not None]
    best = min(running, key=lambda candidate: (not candidate.fits, candidate.step_s), default=None)
    table = Table(
        "schedule", "stages", "bubble", "in span", "peak of a rank", "sent by a rank", "step", "tokens/s", "",
        title=f"schedules, predicted on {hardware.name}", title_justify="left",
    )  # fmt: skip
    for candidate in candidates:
        prediction = candidate.prediction
        if prediction is None:
            table.add_row(candidate.name, *["-"] * 7, f"cannot run: {candidate.reason}")
            continue
        assert prediction.bubble_s is not None and prediction.span_bubble_s is not None
        table.add_row(
            candidate.name,
            str(candidate.num_stages),
            f"{100 * prediction.bubble_s / candidate.step_s:.1f} %",
            f"{100 * prediction.span_bubble_s / candidate.step_s:.1f} %",
            format_bytes(prediction.peak_bytes),
            format_bytes(prediction.communication_bytes),
            format_time(candidate.step_s),
            f"{candidate.tokens / candidate.step_s:,.0f}",
            " ".join(["best"] * (candidate is best) + ["does not fit into memory"] * (not candidate.fits)),
        )
    return table
