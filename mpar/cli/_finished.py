"""The note that a run leaves behind when everything is made of it: of which step its model, pictures and answers are."""

import json
from pathlib import Path

__all__ = ["finished_steps", "note_finished"]

_FILE = "finished.json"


def note_finished(run_dir: Path, step: int) -> None:
    """Note that everything was made of the checkpoint of `step`."""
    (run_dir / _FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def finished_steps(run_dir: Path) -> int:
    """The step of which everything was made; 0 if nothing was."""
    try:
        noted = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    step = noted.get("step") if isinstance(noted, dict) else None
    return step if isinstance(step, int) else 0
