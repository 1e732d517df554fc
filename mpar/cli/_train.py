"""`mpar train`: one run, or with `-m` one run for every job of a sweep."""

from collections.abc import Sequence

from mpar.cli._arguments import CONFIG_DIR_HELP, SWITCHES_HELP, read_arguments
from mpar.cli._later import later
from mpar.cli._run_problems import compose_run, run_problems
from mpar.cli._switches import answer_switches
from mpar.train import TrainConfig

__all__ = ["main"]

_HELP = f"""usage: mpar train [group=choice] [key=value] ... [-m] [--config-dir DIR]

Starts one process on this machine for each rank of the mesh. Under torchrun, each of torchrun's processes is one rank.
Writes into run_dir: config.yaml, program.txt, metrics.jsonl, checkpoints/, loss.png, hf/, finished.json and others.
-m, --multirun: a sweep. A run for every combination of values (key=a,b), each in a folder of its own below runs/.
{CONFIG_DIR_HELP}
{SWITCHES_HELP}"""


def main(args: Sequence[str]) -> int:
    """Train; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "train", TrainConfig):
        return 0
    if arguments.multirun:
        return later("mpar.cli._sweep").sweep(arguments)
    config, resolved = compose_run(arguments.overrides, arguments.user_dir, run_problems)
    later("mpar.cli._train_once").train_once(config, resolved)
    return 0
