"""`mpar plan`: compiles and verifies a run, and prints its program, collectives, memory, and time on each hardware profile."""

from collections.abc import Sequence
from dataclasses import fields

from mpar.cli._arguments import CONFIG_DIR_HELP, SWITCHES_HELP, read_arguments
from mpar.cli._later import later
from mpar.cli._run_problems import compose_run, plan_problems
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError
from mpar.train import PlanConfig, TrainConfig

__all__ = ["main"]

_HELP = f"""usage: mpar plan [group=choice] [key=value] ... [--config-dir DIR]

Takes the same arguments as `mpar train`. Starts no process and makes no tensor, so a laptop can plan any model on any mesh.
Keys of `plan` need no prefix here:
  timeline=FILE.html            draw the predicted step: .html, .svg, or .json for chrome://tracing
  compare=[zbv,one_f_one_b]     compare schedules for this model and mesh in one table; timeline=FILE.html draws them all
  diff=[mesh=pp4,schedule=zbv]  show how the program changes with these overrides
  out=FILE                      write the full program (or table, or difference) to a file
  rank=5 lines=40               show the program of rank 5, and 40 lines of it
  profiles=[a100,b200]          predict the time on these too, besides `hardware`
{CONFIG_DIR_HELP}
{SWITCHES_HELP}"""


def main(args: Sequence[str]) -> int:
    """Plan; returns the exit code."""
    arguments = read_arguments(args)
    overrides, user_dir = [_prefixed(override) for override in arguments.overrides], arguments.user_dir
    if answer_switches(arguments, _HELP, "train", TrainConfig, overrides):
        return 0
    if arguments.multirun:
        raise ConfigError("cannot plan a sweep: leave out -m. compare=[...] compares schedules, diff=[...] compares programs.")
    config, _ = compose_run(overrides, user_dir, plan_problems)
    later("mpar.cli._print_plan").print_plan(config, overrides, user_dir)
    return 0


def _prefixed(arg: str) -> str:
    """`plan.rank=5` for `rank=5`; and quotes around every item in `diff=[key=value]`, without which Hydra cannot read it."""
    key, equals, value = arg.partition("=")
    if equals and key in {field.name for field in fields(PlanConfig)}:
        key = f"plan.{key}"
    if key == "plan.diff" and value.startswith("[") and value.endswith("]"):
        value = "[" + ",".join(f"'{item}'" if item[0] not in "'\"" else item for item in _items(value[1:-1])) + "]"
    return f"{key}{equals}{value}"


def _items(text: str) -> list[str]:
    """`text` split at the commas that are not inside brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]
