"""`mpar rollouts`: shows the answers that a run drew, what they were worth, and how rewards went."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.table import Table
from rich.text import Text

from mpar.cli._later import later
from mpar.cli._screen import print_table, say
from mpar.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mpar.rollouts import Rollout, RolloutFile  # which load torch

__all__ = ["main"]

_HELP = """usage: mpar rollouts show RUN [--number N] [--group G] [--contains TEXT] [--finish stop|length]
                          [--min-reward X] [--max-reward X] [--sort reward|advantage|tokens] [--rows 20] [--full]
                          [--held-out]
       mpar rollouts list RUN [--picture reward.png] [--held-out]

RUN is the run_dir of a run with rollouts, such as one with task=grpo.
  show    answers with their rewards, of the newest drawing or of drawing N (--number; the first is 0): only those that a filter
          lets through, as they were drawn or the highest first (--sort); --full shows prompts and answers to their ends
  list    a line for each drawing: mean rewards, tokens, and shares of answers and groups; --picture draws them over updates,
          and rewards of held-out prompts as points
  --held-out  answers to the prompts of evaluation.sources or evaluation.fraction; their number is that of the update before them

Exit code: 0; 1 if the run has no rollouts; 2 if the command is not understood."""
_SHORT = 60  # characters of a text in a table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"mpar rollouts: {message}.\n{_HELP}")


def main(args: Sequence[str]) -> int:
    """Show rollouts; returns the exit code."""
    if not args or not {"-h", "--help"}.isdisjoint(args):
        say(_HELP)
        return 0
    parser = _Parser(prog="mpar rollouts", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    show, listed = (commands.add_parser(name, add_help=False) for name in ("show", "list"))
    for command in (show, listed):
        command.add_argument("run", type=Path)
        command.add_argument("--held-out", action="store_true")
    listed.add_argument("--picture", type=Path, default=None)
    for name in ("number", "group"):
        show.add_argument(f"--{name}", type=int, default=None)
    show.add_argument("--rows", type=int, default=20)
    show.add_argument("--contains", default=None)
    show.add_argument("--finish", choices=("stop", "length"), default=None)
    show.add_argument("--min-reward", type=float, default=-math.inf)
    show.add_argument("--max-reward", type=float, default=math.inf)
    show.add_argument("--sort", choices=("reward", "advantage", "tokens"), default=None)
    show.add_argument("--full", action="store_true")
    parsed = parser.parse_args(list(args))
    folder = parsed.run / later("mpar.train").ROLLOUTS_FOLDER
    held_out = later("mpar.rollouts").list_rollouts(folder / later("mpar.rollouts").HELD_OUT_FOLDER)
    files = held_out if parsed.held_out else later("mpar.rollouts").list_rollouts(folder)
    if not files:
        kind = "answers to held-out prompts" if parsed.held_out else "rollouts"
        raise CheckpointError(f"there are no {kind} in {folder}: name the run_dir of a run that draws any.")
    if parsed.command == "list":
        _list(files, held_out, parsed.picture)
    else:
        _show(_chosen(files, parsed.number), parsed)
    return 0


def _chosen(files: Sequence[Path], number: int | None) -> "RolloutFile":
    if number is None:
        return later("mpar.rollouts").read_rollouts(files[-1])
    found = [path for path in files if int(path.stem) == number]
    if not found:
        raise CheckpointError(
            f"there is no drawing {number}: {files[0].parent} has {int(files[0].stem)} to {int(files[-1].stem)}."
        )
    return later("mpar.rollouts").read_rollouts(found[0])


def _list(files: Sequence[Path], held_out: Sequence[Path], picture: Path | None) -> None:
    """A line for each drawing, and a picture of them, with the rewards of held-out prompts."""
    rows = [_numbers(path) for path in files]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(f"{row[name]:.4g}" if name in row else "-" for name in names))
    print_table(table)
    if picture is not None:
        say(str(later("mpar.train.curve").draw_rewards(rows, picture, picture.stem, [_numbers(path) for path in held_out])))


def _numbers(path: Path) -> dict[str, float]:
    """The number of a drawing, the update before or after it, and what is worth seeing of it."""
    header = later("mpar.rollouts").read_rollouts(path).header
    return {"number": float(header.number), "step": float(header.step), **header.numbers}


def _show(file: "RolloutFile", asked: argparse.Namespace) -> None:
    """A table of the answers that the filters let through."""
    header = file.header
    kept = [rollout for rollout in file.rollouts if _passes(rollout, asked)]
    if asked.sort is not None:
        kept.sort(key=lambda rollout: _measure(rollout, asked.sort), reverse=True)
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in header.numbers.items())
    place = f"after update {header.step}" if asked.held_out else f"drawing {header.number}, before update {header.step + 1}"
    say(f"{place}: {numbers or 'not rewarded'}")
    table = Table("group", "prompt", "answer", "tokens", "finish", *_names(file), "reward", "advantage", header_style="bold")
    for rollout in kept[: asked.rows]:
        rewards = [_number(rollout.rewards.get(name)) for name in _names(file)]
        texts = [_text(text, full=asked.full) for text in (rollout.prompt, rollout.text)]
        facts = [str(rollout.num_drawn), rollout.finish, *rewards, _number(rollout.reward), f"{rollout.advantage:+.3g}"]
        table.add_row(f"{rollout.group}.{rollout.choice}", *texts, *facts)
    print_table(table)
    say(f"{min(len(kept), asked.rows)} of {len(kept)} that pass, of {len(file.rollouts)} answers")


def _names(file: "RolloutFile") -> list[str]:
    """The names of the rewards, if there are several."""
    names = list(file.rollouts[0].rewards) if file.rollouts else []
    return names if len(names) > 1 else []


def _passes(rollout: "Rollout", asked: argparse.Namespace) -> bool:
    reward = math.nan if rollout.reward is None else rollout.reward
    unbounded = asked.min_reward == -math.inf and asked.max_reward == math.inf
    return (
        (asked.group is None or rollout.group == asked.group)
        and (asked.finish is None or rollout.finish == asked.finish)
        and (asked.contains is None or asked.contains in rollout.prompt or asked.contains in rollout.text)
        and (unbounded or asked.min_reward <= reward <= asked.max_reward)
    )


def _measure(rollout: "Rollout", name: str) -> float:
    if name == "tokens":
        return rollout.num_drawn
    return rollout.advantage if name == "advantage" else -math.inf if rollout.reward is None else rollout.reward


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _text(text: str, *, full: bool) -> Text:
    shown = text if full or len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
    return Text(shown if full else shown.replace("\n", "\\n"))
