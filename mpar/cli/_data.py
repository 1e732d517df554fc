"""`mpar data`: shows the rows of a run as they will be trained on, and what the data are like."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from mpar.cli._arguments import CONFIG_DIR_HELP, SWITCHES_HELP, read_arguments
from mpar.cli._bind import bind
from mpar.cli._later import later
from mpar.cli._run_problems import compose_run, data_problems
from mpar.cli._screen import RowProgress, say
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError, UnknownNameError
from mpar.train import TrainConfig, key

if TYPE_CHECKING:
    from mpar.data import Batches, Tokenizer  # which load torch

__all__ = ["DataKeys", "main"]

_HELP = f"""usage: mpar data show [rows=3] [step=0] [group=choice] [key=value] ...
       mpar data stats [picture=lengths.png] [group=choice] [key=value] ...

Take the same groups and keys as `mpar train`; data, task, seed and steps matter. Nothing is compiled or trained.
  show    the first rows of the batch of a step, as text: what is trained on is green (elsewhere between [[ and ]]), and each
          document begins with the place that it is from
  stats   rows used and left out, by reason, source and format; tokens; lengths; duplicates; how full the sequences are

  mpar data show data=jsonl 'data.sources=[chats.jsonl]' data.tokenizer=FOLDER rows=2
  mpar data stats data=jsonl 'data.sources=[corpus/]' task=pt picture=lengths.png
{CONFIG_DIR_HELP}
{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """The keys that `mpar data` has besides those of `mpar train`."""

    rows: int = key("show: how many rows of the batch", default=3, at_least=1)
    step: int = key("show: the step whose batch it is, from 0", default=0, at_least=0)
    picture: str | None = key("stats: file for a picture of the lengths, .png, .svg or .pdf", default=None)


def main(args: Sequence[str]) -> int:
    """Show data or their statistics; returns the exit code."""
    words = [arg for arg in args[:1] if arg in ("show", "stats")]
    arguments = read_arguments(args[len(words) :])
    own = [arg for arg in arguments.overrides if arg.partition("=")[0] in {field.name for field in fields(DataKeys)}]
    overrides = [arg for arg in arguments.overrides if arg not in own]
    if answer_switches(arguments, _HELP, "train", TrainConfig, overrides):
        return 0
    if not words:
        raise UnknownNameError(f"mpar data {' '.join(args[:1])}: there are `mpar data show` and `mpar data stats`.\n{_HELP}")
    keys = bind(DataKeys, {name: yaml.safe_load(value) for name, _, value in (arg.partition("=") for arg in own)})
    config, _ = compose_run(overrides, arguments.user_dir, data_problems)
    _check_picture(keys.picture)
    train, data = later("mpar.train"), later("mpar.data")
    tokenizer = train.make_tokenizer(config)
    with RowProgress("data", shown=config.progress) as progress:
        wanted = train.training_data(config, config.data.cache_dir)
        if words == ["stats"]:
            wanted = replace(wanted, stream=False)  # to count all rows takes reading all of them
        batches = data.load_dataset(wanted, tokenizer, progress=progress)
    if words == ["show"]:
        say(f"data: {batches.report}")
        for row in range(min(keys.rows, batches.shape.batch_size)):
            if batches.names(keys.step, row):  # a batch at the end of an epoch has rows of padding
                _show_row(batches, tokenizer, keys.step, row)
        batches.close()
    else:
        stats = data.data_stats(batches)
        width = max(len(name) for name, _ in stats.lines())
        say("\n".join(f"{name:{width}}  {text}" for name, text in stats.lines()))
        if keys.picture is not None:
            say(str(later("mpar.train.curve").draw_lengths(stats.lengths, batches.shape.seq_len, Path(keys.picture))))
    return 0


def _check_picture(name: str | None) -> None:
    """Raise ConfigError if no picture can be written there, before any row is read."""
    if name is None:
        return
    path, kinds = Path(name), (".png", ".svg", ".pdf")
    if path.suffix.lower() not in kinds:
        raise ConfigError(f"cannot draw {name}: a picture ends in {', '.join(kinds)}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot draw {name}: there is no folder {path.absolute().parent}. Make it, or choose another place.")


def _show_row(batches: "Batches", tokenizer: "Tokenizer", step: int, row: int) -> None:
    """Print one row: a line that says what it holds, and each document with its place and text."""
    console = Console(soft_wrap=True, highlight=False)
    arrays = {name: values[0].tolist() for name, values in batches.rows(step, [row]).items()}
    trained = [label != -100 for label in arrays["labels"]]
    held = sum(document >= 0 for document in arrays["documents"])
    places = batches.names(step, row)
    say(f"\nstep {step}, row {row}: {held} of {len(trained)} positions, {len(places)} documents, {sum(trained)} trained on")
    count = max(arrays["documents"]) + 1
    for number in range(count):
        positions = [i for i, document in enumerate(arrays["documents"]) if document == number]
        place = places[number] if count == len(places) else ", ".join(places)
        console.print(Text(f"--- {place}", style="bold"))
        console.print(_text(arrays, positions, tokenizer, coloured=console.is_terminal))


def _text(arrays: dict[str, list[Any]], positions: list[int], tokenizer: "Tokenizer", *, coloured: bool) -> Text:
    """The text of a document; what is trained on is marked, and has its weight if that is not 1. The token that a label stands
    for is the one behind its position.
    """
    tokens, labels = arrays["tokens"], arrays["labels"]
    weights = arrays.get("token_weights") or [float(label != -100) for label in labels]
    ids, marks = [tokens[i] for i in positions], [0.0, *(weights[i] for i in positions[:-1])]
    if labels[positions[-1]] != -100:
        ids, marks = [*ids, labels[positions[-1]]], [*marks, weights[positions[-1]]]
    out, begin = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or marks[end] != marks[begin]:
            weight, piece = marks[begin], tokenizer.decode(ids[begin:end])
            piece = piece if weight in (0, 1) else f"{weight:g}: {piece}"
            out.append(f"[[{piece}]]" if weight and not (coloured and weight == 1) else piece, style="green" if weight else "dim")
            begin = end
    return out
