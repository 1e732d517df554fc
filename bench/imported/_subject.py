"""What is trained: three architectures in a small size, as transformers describes them."""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mpar import models, tree
from mpar.mesh import Mesh
from mpar.models import traced
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step

__all__ = ["CLIP_NORM", "DECLARED", "KINDS", "SETTINGS", "SIZES", "batches", "save_programs"]

SIZES: Mapping[str, Mapping[str, int]] = {
    "nano": {"hidden_size": 128, "intermediate_size": 344, "vocab_size": 512, "max_position_embeddings": 64},
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 2048, "max_position_embeddings": 256},
}
"""Rows are as long as there are positions."""
KINDS = ("llama", "qwen3", "gpt_neox")
DECLARED = ("llama", "qwen3")
_NUM_ROWS = 8
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 1.0


def config_of(kind: str, size: str) -> dict[str, object]:
    """The config of a kind in one of the sizes."""
    sizes = {**SIZES[size], "num_hidden_layers": 4, "num_attention_heads": 8, "tie_word_embeddings": False}
    if kind == "gpt_neox":
        return sizes
    return {**sizes, "num_key_value_heads": 4, "head_dim": SIZES[size]["hidden_size"] // 8}


def batches(size: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of one step after the other, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, length = SIZES[size]["vocab_size"], SIZES[size]["max_position_embeddings"]
    while True:
        tokens = torch.randint(vocabulary, (_NUM_ROWS, length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def save_programs(folder: Path, kind: str, size: str, ranks: int) -> dict[str, Program]:
    """The programs of a kind by variant, written for the ranks, with the weights that transformers begins with."""
    torch.manual_seed(0)
    transformers = traced.load_transformers()
    config = transformers.AutoConfig.for_model(kind, **config_of(kind, size))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
    raw = (folder / "hf" / "config.json").read_text()
    found: dict[str, models.Model] = {"traced": traced.TracedModel(raw, torch.float32, None, traced.kept_check(raw))}
    if kind in DECLARED:
        found["declared"] = models.from_config(json.loads(raw))
    programs, rows = {}, (_NUM_ROWS, SIZES[size]["max_position_embeddings"])
    for name, model in found.items():
        optimizer = AdamW(**SETTINGS, decay="all", clip_norm=CLIP_NORM)
        programs[name] = compile_step(model, optimizer, Mesh(fsdp=ranks), "zero3" if ranks > 1 else "ddp", rows)
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(programs[name]))
        torch.save(dict(tree.leaves_with_path(models.load_params(model, folder / "hf"))), folder / f"{name}.pt")
    return programs
