"""What is made of a finished run: the HF folder, pictures, answers. Under torchrun: `python -m mpar.cli._finish FOLDER`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mpar import checkpoint
from mpar.cli._finished import note_finished
from mpar.cli._screen import encode_everything, say
from mpar.errors import CheckpointError
from mpar.train import TrainConfig, make_mesh, make_tokenizer, num_threads, read_job, read_metrics
from mpar.train.answers import answer
from mpar.train.curve import draw_experts, draw_loss, draw_numbers
from mpar.train.export import export_adapter, export_hf, exportable

__all__ = ["finish", "main"]

_SAMPLE = "self-cognition"
_SAMPLE_QUESTIONS = ("Who are you?", "Who developed you?", "你是谁？", "你是谁开发的？")


def finish(config: TrainConfig) -> None:
    """Export the newest checkpoint of the run, draw loss and expert load, let the model answer `task.chat`; print the results."""
    torch.set_num_threads(num_threads(config, make_mesh(config.mesh).size))
    run_dir = Path(str(config.run_dir))
    newest = checkpoint.latest(run_dir / "checkpoints")
    if newest is None:
        raise CheckpointError(f"cannot export {run_dir}: it holds no complete checkpoint")
    folder = export_hf(config, make_tokenizer(config), newest, run_dir / "hf") if exportable(config) else None
    adapter = export_adapter(config, newest, run_dir / "adapter")
    records = read_metrics(run_dir / "metrics.jsonl")
    lines, pictures = [], {}
    if records:
        pictures["loss curve"] = draw_loss(records, run_dir / "loss.png", f"{config.model.name}, {config.strategy.name}")
        numbers = draw_numbers(records, run_dir / "numbers.png", f"{config.model.name}, {config.strategy.name}")
        if numbers is not None:
            pictures["other numbers"] = numbers
        first, last = records[0], records[-1]
        lines.append(f"loss {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}")
        experts = draw_experts(records, run_dir / "experts.png", f"{config.model.name}, {config.strategy.name}")
        if experts is not None:
            pictures["expert load"] = experts
            dropped = f", {100 * last['dropped']:.1f} % dropped" if last["dropped"] else ""
            lines.append(f"experts: the busiest of a layer has {last['max_load']:.2f} times the mean load{dropped}")
        if any(name.startswith("eval_") for name in last):
            perplexity = f", perplexity {last['perplexity']:,.4g}" if "perplexity" in last else ""
            lines.append(f"evaluation: loss {last['eval_loss']:.4f}{perplexity}" if "eval_loss" in last else "held-out prompts:")
            means = {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}
            lines += [f"  {name}: {value:.4f}" for name, value in means.items() if name not in ("loss",) and "loss/" not in name]
            of_sets = {name.partition("/")[2]: loss for name, loss in last.items() if name.startswith("eval_loss/")}
            lines += [f"  {name}: loss {loss:.4f}" for name, loss in of_sets.items()]
    if folder is not None and config.task.kind == "sft":
        lines += _conversation(config, folder)
    results = {
        "checkpoint": newest,
        "model": folder or f"no Hugging Face folder: {config.model.name} does not say how to write one",
    }
    if adapter is not None:
        results["adapter"] = adapter
    lines += [f"{label:12} {path}" for label, path in (results | pictures).items()]
    note_finished(run_dir, int(newest.name.rpartition("_")[2]))
    say("\n".join(lines))


def _questions(config: TrainConfig) -> Sequence[str]:
    """`task.chat`; if that is null, the questions about what the sample data teach, for a model that learned from these."""
    if config.task.chat is not None:
        return config.task.chat
    return _SAMPLE_QUESTIONS if any(name.partition("#")[0] == _SAMPLE for name in config.data.sources) else ()


def _conversation(config: TrainConfig, folder: Path) -> list[str]:
    questions = _questions(config)
    answers = answer(folder, questions, max_new_tokens=config.task.max_new_tokens, group=config.model)
    lines = []
    for question, said in zip(questions, answers, strict=True):
        lines += [f"user       {question}", f"assistant  {said}"]
    return ["", *lines, ""] if lines else []


def main(args: list[str]) -> int:
    """Finish the run of the job in the folder `args[0]`."""
    encode_everything()
    finish(read_job(Path(args[0])).config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
