"""Models of transformers with adapters of PEFT, and the same of mpar with the same values; both train on the same batches."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor

from mpar import adapters, models, tree
from mpar.optim import AdamW, OptState, ScaledRates

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False)
MOE = transformers.Qwen3MoeConfig(
    **SIZES,
    head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.0,
)
LR, STEPS = 3e-3, 20


def save_base(config: transformers.PretrainedConfig, folder: Path) -> tuple[models.Model, tree.Tree]:
    """A model of mpar with random weights, which are written into a folder."""
    model = models.from_config(config.to_dict(), dtype=torch.float32)
    params = tree.map_leaves(lambda x: x * (3 if x.ndim > 1 else 1), model.init(0))
    models.to_hf(model, params, folder)
    return model, params


def of_peft(base: Path, adapter: Path, *, trained: bool = False) -> peft.PeftModel:
    """The model of transformers in `base` with the adapter in a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=trained)


def save_peft(model: peft.PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows = torch.randint(0, SIZES["vocab_size"], (2, 2, 12), generator=generator)
        yield rows[0], rows[1]


def train_peft(model: peft.PeftModel, b_rate: float = 1.0) -> list[float]:
    """Train with torch's AdamW; the loss of each step."""
    named = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    groups = [[x for name, x in named if ("lora_B" in name or "lora_embedding_B" in name) is is_b] for is_b in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "lr": LR}, {"params": groups[1], "lr": LR * b_rate}], betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for tokens, labels in batches():
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_mpar(model: adapters.AdaptedModel, params: tree.Tree, b_rate: float = 1.0) -> tuple[list[float], tree.Tree]:
    """The same with mpar's AdamW: the loss of each step, and the parameters at the end."""
    plain = AdamW(lr=LR, weight_decay=0.0, clip_norm=None)
    optimizer = plain if b_rate == 1 else ScaledRates(plain, (("adapters.*.b", b_rate),))
    leaves = dict(tree.leaves_with_path(params))
    trained = {path: x for path, x in leaves.items() if path not in model.frozen}
    state: OptState = optimizer.init(trained)
    losses = []
    for tokens, labels in batches():
        needed = {path: x.detach().requires_grad_() for path, x in trained.items()}
        loss = model_loss(model, leaves | needed, {"tokens": tokens, "labels": labels})
        grads = dict(zip(needed, torch.autograd.grad(loss, list(needed.values())), strict=True))
        trained, state = optimizer.update(grads, state, trained)
        losses.append(loss.item())
    return losses, rebuilt(model, leaves | trained)


def model_loss(model: models.Trainable, leaves: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch, as the compiled step computes it."""
    params, context, x = rebuilt(model, leaves), model.context(batch), None
    for segment in model.segments:
        x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
    return losses["loss"] / model.weight(batch)


def rebuilt(model: models.Trainable, leaves: dict[str, Tensor]) -> tree.Tree:
    """The tree of parameters with these leaves."""
    like = model.abstract_params
    return tree.unflatten(tree.flatten(like)[1], [leaves[path] for path in tree.paths(like)])
