"""`mpar train`: one run, or with `-m` one run for every job of a sweep."""

from collections.abc import Sequence

from mpar.cli._arguments import CONFIG_DIR_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._help import describe_config
from mpar.cli._screen import say
from mpar.cli._sweep import sweep
from mpar.cli._train_once import train_once
from mpar.train import TrainConfig

__all__ = ["main"]

_HELP = f"""usage: mpar train [group=choice] [key=value] ... [-m] [--config-dir DIR]

Starts one process on this machine for each rank of the mesh. Under torchrun, each of torchrun's processes is one rank.
Writes into run_dir: config.yaml, program.txt, metrics.jsonl, checkpoints/, loss.png, experts.png, hf/, tensorboard/.
-m, --multirun: a sweep. A run for every combination of values (key=a,b), each in a folder of its own below runs/.
{CONFIG_DIR_HELP}"""


def main(args: Sequence[str]) -> int:
    """Train; returns the exit code."""
    arguments = read_arguments(args)
    if arguments.help:
        say(f"{_HELP}\n\n{describe_config('train', TrainConfig, arguments.overrides, arguments.user_dir)}")
        return 0
    if arguments.multirun:
        return sweep(arguments)
    train_once(*compose_config("train", TrainConfig, arguments.overrides, arguments.user_dir))
    return 0
