"""Rollouts on disk: a file of JSON lines for each time that answers were drawn, so that a run can go on between two updates."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mpar.errors import CheckpointError
from mpar.files import Unreadable, read_text
from mpar.rollouts._rollout import Rollout

__all__ = ["RolloutFile", "RolloutHeader", "list_rollouts", "read_rollouts", "rollout_path", "write_rollouts"]

_MAX_BYTES = 2**31
_TUPLES = ("prompt_ids", "answer_ids", "logps")


@dataclass(frozen=True)
class RolloutHeader:
    """The first line of a file. number: how many times answers were drawn before. step: the update before which these were.
    batches: the fingerprint of what the batches depend on. scored: whether the rewards are known. numbers: what is worth seeing.
    """

    number: int
    step: int
    batches: str
    scored: bool
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class RolloutFile:
    """What a file holds."""

    header: RolloutHeader
    rollouts: tuple[Rollout, ...]


def rollout_path(folder: Path, number: int) -> Path:
    """The file of rollouts number `number`."""
    return folder / f"{number:06d}.jsonl"


def list_rollouts(folder: Path) -> list[Path]:
    """The files in `folder`, in the order in which they were drawn."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def write_rollouts(folder: Path, content: RolloutFile) -> None:
    """Write a file; one of the same number is replaced, all at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = rollout_path(folder, content.header.number)
    entries = [asdict(content.header), *(asdict(rollout) for rollout in content.rollouts)]
    lines = [json.dumps(entry, ensure_ascii=False, default=str) for entry in entries]
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="replace")
    draft.replace(path)


def read_rollouts(path: Path) -> RolloutFile:
    """What a file holds. Raises CheckpointError if it is damaged."""
    try:
        first, *lines = read_text(path, _MAX_BYTES).removesuffix("\n").split("\n")
        header = RolloutHeader(**json.loads(first))
        return RolloutFile(header, tuple(_rollout(json.loads(line)) for line in lines))
    except (Unreadable, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read the rollouts in {path}: {error}") from error


def _rollout(plain: dict[str, Any]) -> Rollout:
    known = {item.name: item.default is MISSING and item.default_factory is MISSING for item in fields(Rollout)}
    wanted = {name for name, needed in known.items() if needed}
    if not wanted <= set(plain) <= set(known):
        raise ValueError(f"a line has {sorted(plain)}, and must have {sorted(wanted)}")
    of_tokens = {name: tuple(values) for name, values in plain.get("of_tokens", {}).items()}
    given = tuple((int(begin), int(end)) for begin, end in plain.get("given", ()))
    tuples = {**{name: tuple(plain[name]) for name in _TUPLES}, "turns": tuple(plain.get("turns", ()))}
    return Rollout(**{**plain, **tuples, "of_tokens": of_tokens, "given": given})
