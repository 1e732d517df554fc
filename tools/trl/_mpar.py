"""The rows as mpar reads them, the models that all sides load, and the losses and metrics of tasks, in float64."""

from pathlib import Path

import torch
from torch import Tensor

from mpar import models, tree
from mpar.models.traced import load_transformers
from mpar.tasks import MISMATCHED, Kto, Orpo, Task, TaskChain, task_means
from tools.trl._cases import ROWS

__all__ = ["answer", "save_models"]

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_END = 1


def save_models(folder: Path) -> None:
    """Write a policy, another model as its reference, and the policy with a score in the place of its head."""
    transformers = load_transformers()
    settings = {key: value for key, value in _CONFIG.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model("llama", **settings)
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    scored = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model("llama", **settings, num_labels=1)
    )
    scored.model.load_state_dict(policy.model.state_dict())
    policy.save_pretrained(folder / "policy")
    scored.save_pretrained(folder / "scored")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save_pretrained(folder / "reference")


def answer(task: Task, folder: Path) -> tuple[float, dict[str, float]]:
    """The loss of a task over all rows and its metrics, as one microbatch has them."""
    model = models.from_config(_CONFIG, dtype=torch.float64)
    chain = TaskChain(model, task, model if task.compares else None)
    params = _params(chain, model, folder)
    full = _labels(task)
    batch = {key: full[key] for key in chain.batch_axes if key in full}
    x, context, total = None, chain.context(batch), torch.zeros((), dtype=torch.float64)
    metrics: dict[str, Tensor] = {}
    for segment in chain.segments:
        x, losses, *more = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
        total = total + sum(losses.values())
        metrics |= {f"{segment.name}.{name}": value for name, value in (more[0] if more else {}).items()}
    return float(total / chain.weight(batch)), task_means(metrics)


def _params(chain: TaskChain, model: models.Model, folder: Path) -> tree.Tree:
    """Those of the policy, of the reference model and of the score, each from its own folder."""
    children = dict(tree.children(models.load_params(model, folder / "policy")))
    if chain.copied is not None:
        children["reference"] = models.load_params(model, folder / "reference")
    if chain.task.parameters:
        transformers = load_transformers()
        scored = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scored", dtype=torch.float32)
        children["task"] = {"score_D1": scored.score.weight.detach().T}
    return tree.map_leaves(lambda leaf: leaf.double(), children)


def _labels(task: Task) -> dict[str, Tensor]:
    """All rows: the two answers of a pair side by side; for KTO each answer, and behind it the answer of the row before."""
    ids = [{key: [int(word) for word in str(row[key]).split()] for key in ("prompt", "chosen", "rejected")} for row in ROWS]
    if isinstance(task, Kto):
        single = [(row["prompt"], row[side], 1 - place) for row in ids for place, side in enumerate(("chosen", "rejected"))]
        rows = [
            [(prompt, answer, sign), (prompt, before, MISMATCHED)]
            for (prompt, answer, sign), (_, before, _) in zip(single, [single[-1], *single[:-1]], strict=True)
        ]
    else:
        rows = [[(row["prompt"], row["chosen"], 1), (row["prompt"], row["rejected"], 0)] for row in ids]
    shape, number = (len(rows), 32), (len(rows), 2)
    batch = {key: torch.full(shape, value) for key, value in (("tokens", 0), ("labels", -100), ("positions", 0))}
    batch |= {key: torch.full(shape, -1) for key in ("documents", "answers", "ends", "indices")}
    batch["signs"] = torch.full(number, -1)
    batch["margin"] = torch.tensor([[row["margin"]] * 2 for row in ROWS], dtype=torch.float64)
    for index, row in enumerate(rows):
        begin = 0
        for place, (prompt, words, sign) in enumerate(row):
            tokens = torch.tensor([*prompt, *words, _END])
            end, first = begin + len(tokens), begin + len(prompt) - 1
            batch["tokens"][index, begin:end] = tokens
            batch["positions"][index, begin:end] = torch.arange(len(tokens))
            batch["documents"][index, begin:end] = place
            learned = begin if isinstance(task, Orpo) else first
            batch["labels"][index, learned : end - 1] = tokens[1 + learned - begin :]
            batch["answers"][index, first : end - 1] = place
            batch["indices"][index, first : end - 1] = torch.arange(end - 1 - first)
            batch["ends"][index, end - 1] = place
            batch["signs"][index, place] = sign
            begin = end
    return batch
