"""The arguments of a command: its own switches, and the overrides that go to Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpar.errors import ConfigError

__all__ = ["CONFIG_DIR_HELP", "SWITCHES_HELP", "Arguments", "read_arguments"]

CONFIG_DIR_HELP = (
    "--config-dir DIR: adds your files to mpar's: experiment=mine reads DIR/experiment/mine.yaml, model=mine DIR/model/mine.yaml."
    "\nmodel=, optimizer=, task= and schedule= also take module:function, of a module of your own; other keys are its parameters."
)
SWITCHES_HELP = """--cfg job: prints the composed configuration. --version and --info: what is installed, and where.
Texts (paths, data.system, prompt) are taken as they are, commas, quotes and equals signs included. `null` is no text, and quotes
around all of a text are left out: key="'null'" is the word null. In a sweep (-m) they are Hydra's: a comma separates values."""


@dataclass(frozen=True)
class Arguments:
    """overrides: `group=choice` and `key=value`, and whatever else was given. user_dir: the folder of `--config-dir`, absolute.
    help, multirun, version, info, cfg: switches.
    """

    overrides: tuple[str, ...]
    user_dir: Path | None = None
    help: bool = False
    multirun: bool = False
    version: bool = False
    info: bool = False
    cfg: bool = False


_SWITCHES = {
    "-h": "help",
    "--help": "help",
    "-m": "multirun",
    "--multirun": "multirun",
    "-V": "version",
    "--version": "version",
    "-i": "info",
    "--info": "info",
}
_WITH_VALUE = {"--config-dir": "--config-dir", "-cd": "--config-dir", "--cfg": "--cfg", "-c": "--cfg"}


def read_arguments(args: Sequence[str]) -> Arguments:
    """The arguments of a command.

    Raises ConfigError for `--config-dir` without, or with more than one, folder, and for a `--cfg` that is not `job`.
    """
    overrides: list[str] = []
    given: dict[str, list[str]] = {"--config-dir": [], "--cfg": []}
    switches: set[str] = set()
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        word, equals, value = arg.partition("=")
        if word in _WITH_VALUE:
            no_value = not remaining or "=" in remaining[0] or remaining[0].startswith("-")
            given[_WITH_VALUE[word]].append(value if equals else "" if no_value else remaining.pop(0))
        elif arg in _SWITCHES:
            switches.add(_SWITCHES[arg])
        else:
            overrides.append(arg)
    folders, shown = given["--config-dir"], given["--cfg"]
    if "" in folders:
        raise ConfigError("--config-dir must be followed by a folder: --config-dir DIR group=choice ...")
    if len(folders) > 1:
        raise ConfigError(f"--config-dir was given {len(folders)} times ({', '.join(folders)}): give it once.")
    if any(what not in ("", "job") for what in shown):
        raise ConfigError(
            f"cannot print --cfg {shown[0]}: only `--cfg job` is there, the composed configuration of a run. Settings of "
            "Hydra are given as hydra.KEY=VALUE, and mpar uses them for sweeps alone."
        )
    user_dir = Path(folders[0]).expanduser().resolve() if folders else None
    return Arguments(tuple(overrides), user_dir, cfg=bool(shown), **dict.fromkeys(switches, True))
