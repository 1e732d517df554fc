"""Run by an interpreter that has TRL, with nothing of mpar: losses and metrics of its trainers on given rows, as JSON.

`python _ask.py FOLDER CASES`: FOLDER holds two models as Hugging Face folders, `policy` and `reference`; CASES is a JSON file
with `rows` and `cases`. A case has a trainer and its options; the answer has a loss and metrics, or why there is none.
"""

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.filterwarnings("ignore")
logging.disable(logging.ERROR)

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402

datasets.disable_progress_bars()
datasets.disable_caching()
transformers.utils.logging.disable_progress_bar()
END, PAD = 1, 2
PLACES = {"CPO": "trl.experimental.cpo", "ORPO": "trl.experimental.orpo"}


def tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """Every number is the word for itself; END and PAD have names."""
    names = {END: "<end>", PAD: "<pad>"}
    words = tokenizers.models.WordLevel({names.get(i, str(i)): i for i in range(size)}, unk_token="<pad>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def found(name: str) -> type:
    """A class of TRL, wherever this version has it."""
    if hasattr(trl, name):
        return getattr(trl, name)
    place = PLACES.get(name.removesuffix("Trainer").removesuffix("Config"))
    if place is None:
        raise AttributeError(f"trl {trl.__version__} has no {name}")
    return getattr(importlib.import_module(place), name)


def dataset(kind: str, rows: list[dict]) -> datasets.Dataset:
    """The rows as a trainer reads them. The end is appended by the trainer."""
    if kind != "KTO":
        return datasets.Dataset.from_list([{k: row[k] for k in ("prompt", "chosen", "rejected", "margin")} for row in rows])
    pairs = [(row["prompt"], row[side], side == "chosen") for row in rows for side in ("chosen", "rejected")]
    return datasets.Dataset.from_list([{"prompt": p, "completion": c, "label": label} for p, c, label in pairs])


def loss(folder: Path, case: dict, rows: list[dict]) -> dict:
    """The loss of the first batch, which has all rows, and the metrics that the trainer has noted."""
    kind = case["trainer"]
    base, config = found(f"{kind}Trainer"), found(f"{kind}Config")
    data = dataset(kind, rows)
    args = {"output_dir": str(folder / "out"), "per_device_train_batch_size": len(data), "report_to": [], "use_cpu": True}
    args |= {"bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}

    class Sequential(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return SequentialSampler(self.train_dataset)

    auto = transformers.AutoModelForSequenceClassification if kind == "Reward" else transformers.AutoModelForCausalLM
    models = {"model": auto.from_pretrained(folder / ("scored" if kind == "Reward" else "policy"), dtype=torch.float32)}
    if kind in ("DPO", "KTO"):
        models["ref_model"] = auto.from_pretrained(folder / "reference", dtype=torch.float32)
    if kind == "Reward":  # prompts are part of both answers
        data = data.map(
            lambda row: {side: row["prompt"] + row[side] for side in ("chosen", "rejected")}, remove_columns=["prompt"]
        )
    size = models["model"].config.vocab_size
    trainer = Sequential(**models, args=config(**args, **case["options"]), train_dataset=data, processing_class=tokenizer(size))
    trainer.model.eval()  # there is no dropout; metrics are those of training
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    value = trainer.compute_loss(trainer.model, batch)
    metrics = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    means = {name: float(torch.tensor(values, dtype=torch.float64).mean()) for name, values in metrics["train"].items() if values}
    if kind == "KTO":  # sums, which its log divides by counts
        for side in ("chosen", "rejected"):
            for name in [name for name in means if name.endswith(f"/{side}_sum")]:
                means[name.removesuffix("_sum")] = means[name] / means[f"count/{side}"]
    return {"loss": float(value), "metrics": means}


def main(folder: Path, questions: Path) -> None:
    """Answer all cases of the file."""
    asked = json.loads(questions.read_text())
    answers = {}
    for name, case in asked["cases"].items():
        try:
            answers[name] = loss(folder, case, asked["rows"])
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            answers[name] = {"missing": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps({"version": trl.__version__, "answers": answers}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
