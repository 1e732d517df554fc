"""Makes a job ready to start: a kept one if there is one, else one that is prepared now. Only the latter loads torch.

Under torchrun: `python -m mpar.cli._start FOLDER`.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from mpar.cli._bind import bind
from mpar.cli._failures import write_failure
from mpar.cli._later import later
from mpar.cli._signals import Stopped, signals_stop
from mpar.parent_process import end_with_parent
from mpar.train import MALFORMED_FILE, PlainConfig, TrainConfig, find_kept_job, write_run_dir
from mpar.user_cache import user_cache

__all__ = ["REQUEST", "Start", "main", "prepared_start"]

REQUEST = "request.yaml"


@dataclass(frozen=True)
class Start:
    """A job that is ready to start. summary: lines that describe it. source: where its program comes from."""

    summary: str
    source: str


def prepared_start(config: TrainConfig, resolved: PlainConfig, folder: Path) -> Start:
    """Write what ranks load into `folder`. Raises MparError for whatever is wrong with the configuration, data or checkpoint."""
    cache, run_dir = _cache_folder(config.compile_cache), config.run_dir
    kept = None if cache is None else find_kept_job(cache, config, resolved)
    summary = None if kept is None else kept.restore(folder)
    if summary is not None:
        write_run_dir(folder, run_dir)
        Path(str(run_dir), MALFORMED_FILE).unlink(missing_ok=True)  # of an older run: data with malformed rows are not kept
        source = "all of it from the cache"
    else:
        summary, source, repeatable = later("mpar.cli._prepare").prepare_job(config, resolved, folder, cache)
        if kept is not None and repeatable:
            kept.keep(folder, summary)
    return Start(f"{summary}run_dir: {run_dir}", source)


def _cache_folder(name: str | None) -> Path | None:
    """The folder that `compile_cache` names."""
    return user_cache() / "programs" if name == "user" else None if name is None else Path(name)


def main(args: list[str]) -> int:
    """Prepare the job that local rank 0 of torchrun asks for in the folder `args[0]`, which is private to this user."""
    end_with_parent(os.getppid())
    folder = Path(args[0])
    try:
        with signals_stop():
            resolved = yaml.safe_load((folder / REQUEST).read_text(encoding="utf-8"))
            start = prepared_start(bind(TrainConfig, resolved), resolved, folder)
            (folder / "summary.txt").write_text(f"{start.summary}\n{start.source}", encoding="utf-8")
    except Exception as error:
        write_failure(folder, 0, error)
        return 1
    except Stopped as stopped:
        return stopped.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
