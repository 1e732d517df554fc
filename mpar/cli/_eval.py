"""`mpar eval`: the loss of a model on whole sets, and how many questions of tasks it answers as it should."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from mpar.cli._answering import AnswerKeys, answer_problems, answering
from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._later import later
from mpar.cli._local_model import local_folder
from mpar.cli._model_folder import model_folder
from mpar.cli._screen import CompileNotes, CountProgress, print_table, say, say_aside
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError, DataError
from mpar.files import MAX_JSON_BYTES, Unreadable, read_json
from mpar.train import key

if TYPE_CHECKING:
    from mpar.infer import Assistant, Question, Score  # which load torch
    from mpar.models import Model

__all__ = ["EvalConfig", "main"]

_HELP = f"""usage: mpar eval path=RUN_OR_HF_FOLDER [sets=[held_out.jsonl]] [tasks=[questions.jsonl]] [out=scores.json] [key=value]
       mpar eval compare=[first.json,second.json] [picture=scores.png]

sets are data as in data.sources: each row counts once, and none is packed with others. A task has an object in each line: with
"prompt", "choices" and the index "answer", which is scored by log-probabilities, or with "prompt" and the text "answer", which
the model has to write ("chat": true asks it in the chat template; "stop" and "max_tokens" may be given).
harness are tasks of lm-evaluation-harness, which needs the extra `harness`: pip install 'mpar[harness]'.

{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(AnswerKeys):
    """The keys of `mpar eval`."""

    path: str | None = key("an HF folder, or the run_dir of a run", default=None)
    sets: tuple[str, ...] = key("data whose loss is computed, named like data.sources", default=())
    kind: str = key("sft: conversations, with the loss on answers; pt: texts, with the loss on every token", default="sft")
    seq_len: int = key("longer rows are cut into documents of so many positions", default=2048, at_least=1)
    tasks: tuple[str, ...] = key("files with questions and their answers", default=())
    harness: tuple[str, ...] = key("tasks of lm-evaluation-harness: its names, or YAML files that describe one", default=())
    num_fewshot: int | None = key("harness: examples before each question; null: as its task says", default=None, at_least=0)
    limit: int | None = key("harness: only so many questions of each task", default=None, at_least=1)
    chat: bool = key("harness: questions are asked in the model's chat template", default=False)
    out: str | None = key("the file for the results, .json", default=None)
    compare: tuple[str, ...] = key("files with results, which are shown beside each other", default=())
    picture: str | None = key("a picture of the results, .png, .svg or .pdf", default=None)


def main(args: Sequence[str]) -> int:
    """Evaluate, or compare results; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "eval", EvalConfig):
        return 0
    config, _ = compose_config("eval", EvalConfig, arguments.overrides, arguments.user_dir)
    _check(config)
    results = {name: _read_results(Path(name)) for name in config.compare}
    if config.path is not None:
        results[config.path] = _evaluate(config, config.path)
        if config.out is not None:
            Path(config.out).write_text(json.dumps(results[config.path], indent=2) + "\n", encoding="utf-8")
    _show(results)
    if config.picture is not None:
        say(str(later("mpar.train.curve").draw_scores(results, Path(config.picture))))
    return 0


def _check(config: EvalConfig) -> None:
    """Raise ConfigError for keys that do not go together, before anything is loaded."""
    problems = answer_problems(config)
    if (config.path is None) == (not config.compare):
        problems.append("give either path (a model) or compare (files with results)")
    if config.path is not None and not (config.sets or config.tasks or config.harness):
        problems.append("there is nothing to evaluate on: give sets, tasks or harness")
    if not config.harness and (config.num_fewshot is not None or config.limit is not None or config.chat):
        problems.append("num_fewshot, limit and chat are for tasks of harness: give harness=, or leave them out")
    if config.kind not in ("sft", "pt"):
        problems.append(f"kind={config.kind}: choose sft or pt")
    for name, value in (("out", config.out), ("picture", config.picture)):
        if value is not None and not Path(value).absolute().parent.is_dir():
            problems.append(f"{name}={value}: there is no folder {Path(value).absolute().parent}")
    if config.picture is not None and Path(config.picture).suffix.lower() not in (".png", ".svg", ".pdf"):
        problems.append(f"picture={config.picture}: a picture ends in .png, .svg or .pdf")
    if problems:
        raise ConfigError("cannot evaluate:\n  " + "\n  ".join(problems))


def _evaluate(config: EvalConfig, path: str) -> dict[str, object]:
    """The results of one model: losses by set, scores by task."""
    folder = model_folder(Path(local_folder(path)), "evaluate")
    score_harness = _harness() if config.harness else None
    tasks = {name: later("mpar.infer").read_task(Path(name)) for name in config.tasks}
    with answering(config, folder, CompileNotes(shown=config.execution == "inductor")) as (model, assistant):
        for name, questions in tasks.items():
            later("mpar.infer").check_task(assistant, questions, name)
        losses = {name: _loss(config, name, model, assistant) for name in config.sets}
        scores = {name: _scores(name, questions, assistant) for name, questions in tasks.items()}
        if score_harness is not None:
            how = {"num_fewshot": config.num_fewshot, "limit": config.limit, "chat": config.chat}
            found = score_harness(assistant, config.harness, **how)
            scores |= {name: _by_measure(measures) for name, measures in found.items()}
    return {"model": str(folder), "sets": losses, "tasks": scores}


def _loss(config: EvalConfig, name: str, model: "Model", assistant: "Assistant") -> dict[str, float]:
    """The loss on one set."""
    data = later("mpar.data")
    seq_len = min(config.seq_len, assistant.engine.runner.sizes.length)
    if seq_len < config.seq_len:
        say_aside(f"{name}: rows are cut at {seq_len} tokens, the room that this model has, and not at seq_len={config.seq_len}")
    settings = data.DataConfig(
        kind=config.kind, sources=(name,), batch_size=1, seq_len=seq_len, packing=False, shuffle=False, truncation="split"
    )
    batches = data.load_dataset(settings, assistant.tokenizer, vocab_size=model.vocab_size)
    say_aside(f"{name}: {batches.report}")
    with CountProgress(name, len(batches.documents)) as progress:
        found = later("mpar.infer").loss_of(assistant.engine.runner, batches.documents, progress)
    return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.num_tokens}


def _scores(name: str, questions: Sequence["Question"], assistant: "Assistant") -> dict[str, dict[str, float | None]]:
    """The scores in one task."""
    with CountProgress(name, len(questions)) as progress:
        found = later("mpar.infer").score_task(assistant, questions, progress)
    return _by_measure(found)


def _by_measure(scores: Sequence["Score"]) -> dict[str, dict[str, float | None]]:
    return {score.name: {"value": score.value, "error": score.error, "questions": score.num_questions} for score in scores}


def _harness() -> Callable[..., dict[str, list["Score"]]]:
    """The function that scores tasks of the harness. Raises ConfigError if that is not installed."""
    try:
        return later("mpar.infer.harness").score_harness
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot use harness: {error.name} is missing. Install it: pip install 'mpar[harness]'.") from None


def _read_results(path: Path) -> dict[str, object]:
    """The results in a file that `out` named."""
    try:
        results = read_json(path, MAX_JSON_BYTES)
    except Unreadable as error:
        raise ConfigError(f"cannot compare {path}: {error}.") from None
    if not isinstance(results.get("sets"), Mapping) or not isinstance(results.get("tasks"), Mapping):
        raise DataError(f"cannot compare {path}: it has no results of `mpar eval out=...`.")
    return results


def _show(results: Mapping[str, Mapping]) -> None:
    """Print a table with a row for each measure of each set and task, and a column for each model."""
    table = Table("set or task", "measure", *results, box=None, pad_edge=False)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for model, found in results.items():
        for name, values in found["sets"].items():
            rows.setdefault((name, "loss"), {})[model] = f"{values['loss']:.4f}"
            rows.setdefault((name, "perplexity"), {})[model] = f"{values['perplexity']:,.4g}"
        for name, measures in found["tasks"].items():
            for measure, values in measures.items():
                error = "" if values["error"] is None else f" ± {values['error']:.3f}"
                rows.setdefault((name, measure), {})[model] = f"{values['value']:.3f}{error}"
    for (name, measure), cells in rows.items():
        table.add_row(name, measure, *(cells.get(model, "-") for model in results))
    print_table(table)
