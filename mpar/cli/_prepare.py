"""Prepares a job: checks it, compiles its program, tokenises its data. Under torchrun: `python -m mpar.cli._prepare FOLDER`."""

import math
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from mpar.cli._placement import slow_axes
from mpar.cli._worker import write_failure
from mpar.data import Tokenizer
from mpar.program import Hardware, Program, describe_kernels, format_bytes
from mpar.schedules import num_stages
from mpar.train import Job, PlainConfig, RunSetup, TrainConfig, make_setup
from mpar.train.prepare import prepare

__all__ = ["REQUEST", "PreparedJob", "main", "prepare_job"]

REQUEST = "request.pickle"


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready to start, with the setup and tokenizer that it was made with, and a summary to print."""

    job: Job
    setup: RunSetup
    tokenizer: Tokenizer
    summary: str


def prepare_job(config: TrainConfig, resolved: PlainConfig, folder: Path) -> PreparedJob:
    """Write what ranks load into `folder`. Raises MparError for whatever is wrong with the configuration, data or checkpoint."""
    setup = make_setup(config)
    job, data = prepare(setup, resolved, folder)
    program = job.program
    prediction = program.predict()
    parameters = sum(math.prod(leaf.shape) for leaf in program.state_in if leaf.path.startswith("params."))
    begin = "from the start" if job.resume is None else f"goes on from {job.resume}"
    summary = (
        f"{config.model.name}: {parameters / 1e6:,.2f} M parameters, {program.facts.mesh}, "
        f"strategy {config.strategy.name}, {begin}\n"
        f"data: {data.training.report}\n"
        f"program: {len(program.instructions)} instructions, {prediction.num_collectives} collectives a step, "
        f"{format_bytes(prediction.communication_bytes)} sent by a rank, peak {format_bytes(prediction.peak_bytes)} predicted\n"
        f"{_pipeline_line(program, setup.hardware)}{_kernels_line(program)}{_warnings(setup, program)}"
        f"run_dir: {config.run_dir}"
    )
    return PreparedJob(job, setup, data.tokenizer, summary)


def _kernels_line(program: Program) -> str:
    """A line on which kernels carry out primitives, if any were asked for or could have been used."""
    line = describe_kernels(program.facts.kernels, (use for kind in program.kinds.values() for use in kind.kernels))
    return f"{line}\n" if line else ""


def _warnings(setup: RunSetup, program: Program) -> str:
    """A line for each warning of `slow_axes`."""
    slow = slow_axes(setup.strategy, program.facts.mesh, setup.model, setup.hardware)
    return "".join(f"warning: {line}\n" for line in slow)


def _pipeline_line(program: Program, hardware: Hardware) -> str:
    """A line on the pipeline, if there is one."""
    if len(program.parts) == 1:
        return ""
    prediction = program.predict(hardware)
    assert prediction.step_s and prediction.bubble_s is not None
    return (
        f"pipeline: {program.facts.schedule}, {num_stages(program.schedule)} stages, "
        f"{program.num_microbatches} microbatches, bubble {100 * prediction.bubble_s / prediction.step_s:.1f} % predicted\n"
    )


def main(args: list[str]) -> int:
    """Prepare the job that local rank 0 of torchrun asks for in the folder `args[0]`, which is private to this user."""
    folder = Path(args[0])
    config, resolved = pickle.loads((folder / REQUEST).read_bytes())
    try:
        prepared = prepare_job(config, resolved, folder)
        (folder / "summary.txt").write_text(prepared.summary, encoding="utf-8")
    except Exception as error:
        write_failure(folder, 0, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
