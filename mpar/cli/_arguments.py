"""The arguments of a command: its own switches, and the overrides that go to Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpar.errors import ConfigError

__all__ = ["CONFIG_DIR_HELP", "Arguments", "read_arguments"]

CONFIG_DIR_HELP = (
    "--config-dir DIR: adds your files to mpar's: experiment=mine reads DIR/experiment/mine.yaml, model=mine DIR/model/mine.yaml."
)


@dataclass(frozen=True)
class Arguments:
    """overrides: `group=choice` and `key=value`. user_dir: the folder of `--config-dir`, absolute. help, multirun: switches."""

    overrides: tuple[str, ...]
    user_dir: Path | None = None
    help: bool = False
    multirun: bool = False


def read_arguments(args: Sequence[str]) -> Arguments:
    """The arguments of a command. Raises ConfigError for `--config-dir` without, or with more than one, folder."""
    overrides: list[str] = []
    folders: list[str] = []
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if arg == "--config-dir":
            if not remaining or "=" in remaining[0] or remaining[0].startswith("-"):
                raise ConfigError("--config-dir must be followed by a folder: --config-dir DIR group=choice ...")
            folders.append(remaining.pop(0))
        elif arg.startswith("--config-dir="):
            folders.append(arg.removeprefix("--config-dir="))
        else:
            overrides.append(arg)
    if len(folders) > 1:
        raise ConfigError(f"--config-dir was given {len(folders)} times ({', '.join(folders)}): give it once.")
    switches = {"-h", "--help", "-m", "--multirun"}
    return Arguments(
        tuple(arg for arg in overrides if arg not in switches),
        Path(folders[0]).expanduser().resolve() if folders else None,
        help=not {"-h", "--help"}.isdisjoint(overrides),
        multirun=not {"-m", "--multirun"}.isdisjoint(overrides),
    )
