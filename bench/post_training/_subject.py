"""What is trained: the peers' model with an adapter, or by pairs of answers, and the rows of each step."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench._workload import hf_config
from mpar import adapters, models, tree
from mpar.adapters import LoRA
from mpar.mesh import Mesh
from mpar.models.traced import load_transformers
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step
from mpar.tasks import Dpo, TaskChain

__all__ = ["ADAPTER", "BETA", "CASES", "CLIP_NORM", "SETTINGS", "packed", "pairs", "save_program", "save_start"]

CASES = ("lora", "dpo", "dpo_lora")
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
CLIP_NORM = 1.0
BETA = 0.1
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def pairs(cfg, rows: int, equal: bool) -> Iterator[list[dict[str, list[int]]]]:  # type: ignore[no-untyped-def]
    """Endless: `rows` prompts a step, each with two answers, as tokens. A prompt with an answer has `cfg.seq` tokens at most, and
    exactly so many if `equal`; otherwise a quarter of that at least.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    while True:
        step = []
        for _ in range(rows):
            prompt = cfg.seq // 8
            lengths = [cfg.seq - prompt if equal else draw(cfg.seq // 8, cfg.seq - prompt) for _ in range(2)]
            ids = [torch.randint(1, cfg.vocab, (length,), generator=generator).tolist() for length in (prompt, *lengths)]
            step.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
        yield step


def packed(step: list[dict[str, list[int]]], cfg) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """The same pairs as mpar reads them: both answers of a pair, each behind its prompt, in one row."""
    shape = (len(step), 2 * cfg.seq)
    batch = {key: torch.full(shape, value) for key, value in (("tokens", 0), ("labels", -100), ("positions", 0))}
    batch |= {"documents": torch.full(shape, -1), "answers": torch.full(shape, -1)}
    batch["signs"] = torch.tensor([[1, 0]] * len(step))
    for row, pair in enumerate(step):
        begin = 0
        for number, name in enumerate(("chosen_ids", "rejected_ids")):
            ids = torch.tensor(pair["prompt_ids"] + pair[name])
            end, first = begin + len(ids) - 1, begin + len(pair["prompt_ids"]) - 1
            batch["tokens"][row, begin:end] = ids[:-1]
            batch["positions"][row, begin:end] = torch.arange(len(ids) - 1)
            batch["documents"][row, begin:end] = number
            batch["labels"][row, first:end] = ids[len(pair["prompt_ids"]) :]
            batch["answers"][row, first:end] = number
            begin = end
    return batch


def save_start(folder: Path, cfg, workload: ModuleType) -> None:  # type: ignore[no-untyped-def]
    """Write the peers' first weights as a Hugging Face folder, `hf`, and an adapter on them as PEFT's folder, `adapter`."""
    import peft

    hf = folder / "hf"
    hf.mkdir()
    peer = workload.init_(workload.Llama(cfg))
    tensors = {n if n.startswith("lm_head") else f"model.{n}": p.detach() for n, p in peer.named_parameters()}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text(json.dumps(hf_config(cfg, workload)))
    torch.manual_seed(0)
    base = load_transformers().AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**ADAPTER))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    adapted.save_pretrained(folder / "adapter")


def save_program(folder: Path, case: str, cfg, mesh: Mesh, strategy: str, rows: int) -> Program:  # type: ignore[no-untyped-def]
    """Compile the step of a case, and write it with its first parameters for the ranks."""
    base = models.from_config(json.loads((folder / "hf" / "config.json").read_text()))
    params = models.load_params(base, folder / "hf")
    model = base
    if case != "dpo":
        model = adapters.add(base, LoRA(rank=ADAPTER["r"], alpha=ADAPTER["lora_alpha"]))
        params = adapters.read_peft(model, folder / "adapter", params)
    leaves = dict(tree.leaves_with_path(params))
    chain, shapes = model, (rows, cfg.seq)
    if case != "lora":
        batch = packed(next(pairs(cfg, rows, True)), cfg)
        shapes = {key: (tuple(x.shape), x.dtype) for key, x in batch.items()}
        chain = TaskChain(model, Dpo(beta=BETA), base, shared=case == "dpo_lora")
        if case == "dpo":
            leaves |= {f"reference.{path}": leaf for path, leaf in leaves.items()}
    program = compile_step(chain, AdamW(**SETTINGS, clip_norm=CLIP_NORM), mesh, strategy, shapes)
    (folder / "program.pickle").write_bytes(pickle.dumps(program))
    torch.save(leaves, folder / "params.pt")
    return program
