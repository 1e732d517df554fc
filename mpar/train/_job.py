"""Job: what a launcher hands to the ranks of its node, as plain data in a folder that only its owner can write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpar import plain
from mpar.program import Program
from mpar.train._config import PlainConfig, TrainConfig
from mpar.train._job_folder import JOB_FILE, read_private, read_run_dir, write_private, write_run_dir
from mpar.train._place import Place
from mpar.train._setup import run_optimizer

__all__ = ["Job", "read_job", "write_job"]


@dataclass(frozen=True)
class Job:
    """config: the bound configuration. resolved: the same as plain data, for the records. program: the compiled training.
    resume: the checkpoint to go on from, if any. evaluation: the program that evaluates, if the run does. init: the checkpoint or
    Hugging Face folder that has the first parameters of a fresh start, if any. changes: what differs from the configuration that
    the checkpoint records, a line each. fingerprint: of the data, as they were when the job was prepared.
    optimizer_steps: for how many steps the learning rate is made; None: those of the configuration. reference: the program that
    gives the log-probabilities of a reference model before the first step, if the batches of the run have them.
    measure: the program that gives what the task measures of answers. scorers: those that score answers, by the folder of the
    reward model."""

    config: TrainConfig
    resolved: PlainConfig
    program: Program
    resume: Path | None = None
    evaluation: Program | None = None
    init: Path | None = None
    changes: tuple[str, ...] = ()
    fingerprint: str = ""
    optimizer_steps: int | None = None
    reference: Program | None = None
    measure: Program | None = None
    scorers: Mapping[str, Program] = field(default_factory=dict)

    def program_at(self, place: Place | None) -> Program:
        """The program that a rank at `place` is running: the training or the evaluation."""
        return self.evaluation if place is not None and place.evaluating and self.evaluation is not None else self.program


def write_job(folder: Path, job: Job) -> None:
    """Write `job` into `folder`, which must be private, because ranks run the code of its programs."""
    anywhere = replace(job, config=replace(job.config, run_dir=None), resolved=job.resolved | {"run_dir": None})
    evaluation = None if job.evaluation is None else job.evaluation.with_optimizer(None)
    without = replace(anywhere, program=job.program.with_optimizer(None), evaluation=evaluation)  # ranks make the optimizer
    write_private(folder / JOB_FILE, plain.to_text(Job, without))
    write_run_dir(folder, job.config.run_dir)


def read_job(folder: Path) -> Job:
    """The job that this user's launcher wrote into `folder`. Raises ConfigError if another user could have written it, and
    PlainDataError if it is damaged. The optimizer is made of the configuration."""
    job, run_dir = plain.from_text(Job, read_private(folder / JOB_FILE)), read_run_dir(folder)
    program = job.program.with_optimizer(run_optimizer(job.config, job.optimizer_steps or job.config.steps))
    return replace(
        job, program=program, config=replace(job.config, run_dir=run_dir), resolved=job.resolved | {"run_dir": run_dir}
    )
