"""Prepares a job: checks it, compiles its program, tokenises its data. Importing this loads torch."""

from pathlib import Path

from mpar.cli._paths import with_absolute_paths
from mpar.cli._placement import slow_axes
from mpar.cli._screen import RowProgress
from mpar.program import Hardware, Program, describe_kernels, format_bytes, parameters_in_words
from mpar.schedules import num_stages
from mpar.train import Job, PlainConfig, RunSetup, TrainConfig, make_setup
from mpar.train.prepare import prepare

__all__ = ["prepare_job"]


def prepare_job(config: TrainConfig, resolved: PlainConfig, folder: Path, kept: Path | None) -> tuple[str, str, bool]:
    """Write what ranks load into `folder`. Returns lines that describe the job, one on where its program comes from, and whether
    the next run could use the job without more: it has no notices of this run, and no list of malformed rows.

    kept: the folder of what is kept from run to run, if anything is.
    Raises MparError for whatever is wrong with the configuration, data or checkpoint.
    """
    setup = make_setup(config)
    with RowProgress("data", shown=config.progress) as progress:
        prepared = prepare(setup, with_absolute_paths(resolved, Path.cwd()), folder, kept, progress)
    job, data, program = prepared.job, prepared.data, prepared.job.program
    prediction = program.predict()
    summary = "".join(f"{line}\n" for line in prepared.moved) + (
        f"{config.model.name}: {parameters_in_words(program)}, {program.facts.mesh}, "
        f"strategy {config.strategy.name}, {_beginning(job)}\n"
        f"{data.summary}\n"
        f"program: {len(program.instructions)} instructions, {prediction.num_collectives} collectives a step, "
        f"{format_bytes(prediction.communication_bytes)} sent by a rank, peak {format_bytes(prediction.peak_bytes)} predicted\n"
        f"{_pipeline_line(program, setup.hardware)}{_kernels_line(program)}{_warnings(setup, program)}"
    )
    data.close()  # the ranks read on
    plain = data.malformed_file is None and not any(batches.report.notice for batches in data.all_batches)
    return summary, prepared.compiled, plain


def _beginning(job: Job) -> str:
    """Where the first state comes from, and below it a line for each difference from the configuration of that checkpoint."""
    if job.resume is not None:
        begin = f"goes on from {job.resume}" + (", parameters only" if job.config.resume.state == "weights" else "")
    else:
        begin = "from the start" if job.init is None else f"from the parameters in {job.init}"
    changed = "\nchanged since (then -> now):" if job.changes else ""
    return begin + changed + "".join(f"\n  {line}" for line in job.changes)


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
