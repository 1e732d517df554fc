"""How to continue a run that has ended before its time, in words."""

from pathlib import Path

from mpar.cli._later import later
from mpar.errors import CheckpointError
from mpar.train import TrainConfig

__all__ = ["after_failure", "after_stop"]


def after_stop(config: TrainConfig, sweep: Path | None = None) -> str:
    """One line for a run that was asked to stop: what is saved, and how to go on. sweep: the folder of the sweep of its job."""
    try:
        newest = _newest(config)
    except CheckpointError:
        return f"the newest checkpoint cannot be read: `mpar checkpoint verify {config.run_dir}` says why"
    words = _words(config, sweep)
    if newest is None:
        again = "" if sweep is None else f" with {words}"
        return f"nothing was saved, because no step was done; to start again, run the same command{again}"
    if sweep is None and newest.name.endswith(f"_{config.steps:08d}"):
        return f"all steps are done, and {newest} is saved; `mpar export run_dir={config.run_dir}` writes the model"
    return f"{newest} is saved; to go on, run the same command with {words}"


def after_failure(config: TrainConfig, sweep: Path | None = None) -> str:
    """The line below the error of a run that has failed; empty if there is nothing to go on from."""
    try:
        newest = _newest(config)
    except CheckpointError as error:
        return f"\n{error}"
    return "" if newest is None else f"\nTo go on from the newest checkpoint, run the same command with {_words(config, sweep)}."


def _words(config: TrainConfig, sweep: Path | None) -> str:
    """What the same command needs besides to go on from the newest checkpoint of the run, rather than to begin as it began."""
    words = [f"run_dir={sweep or config.run_dir}"]
    if config.resume.path != "auto":
        words.append("resume=auto")
    if not config.checkpoint.optimizer_state:
        words.append("resume=weights")
    elif config.resume.state != "all":
        words.append("resume.state=all")
    return " ".join(words)


def _newest(config: TrainConfig) -> Path | None:
    if config.run_dir is None:
        return None
    newest: Path | None = later("mpar.checkpoint").latest(Path(config.run_dir) / "checkpoints")
    return newest
