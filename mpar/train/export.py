"""After training: writes a checkpoint as a folder that transformers loads, and lets the model in such a folder answer."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from mpar import models
from mpar.data import Tokenizer
from mpar.infer import generate
from mpar.models import Model
from mpar.train._state import load_params

__all__ = ["answer", "export_hf"]


def export_hf(model: Model, tokenizer: Tokenizer, checkpoint: Path, folder: Path) -> Path:
    """Write weights, config and tokenizer into `folder`. A folder that exists is replaced once the new one is complete."""
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    models.to_hf(model, load_params(model, checkpoint), draft)
    tokenizer.save(draft)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    return folder


def answer(folder: Path, questions: Sequence[str], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> list[str]:
    """The answers of the model in an HF `folder`. Each question is asked by itself."""
    model, params = models.from_hf(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_folder(folder)
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    answers = []
    for question in questions:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        out = generate(model, params, torch.tensor([ids]), max_new_tokens, temperature=temperature, seed=seed, eos_ids=eos)
        answers.append(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True).strip())
    return answers
