"""The peers' workload as mpar compiles it: the model, its weights by parameter name, the step of a mesh."""

import json
import pickle
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from mpar import models, tree
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_step

__all__ = ["MESHES", "build_model", "compile_workload", "initial_params", "peers_optimizer", "save_workload"]

MESHES: dict[str, tuple[Mesh, str]] = {
    "one": (Mesh(dp=1), "ddp"),
    "dp2": (Mesh(dp=2), "ddp"),
    "dp4": (Mesh(dp=4), "ddp"),
    "fsdp2": (Mesh(fsdp=2), "zero3"),
    "fsdp4": (Mesh(fsdp=4), "zero3"),
    "tp2": (Mesh(tp=2), "tp"),
    "tp2+sp": (Mesh(tp=2), "tp_sp"),
    "tp4+sp": (Mesh(tp=4), "tp_sp"),
    "fsdp2xtp2+sp": (Mesh(fsdp=2, tp=2), "zero3_tp_sp"),
    "dp2xfsdp2": (Mesh(dp=2, fsdp=2), "hsdp"),
    "pp2": (Mesh(pp=2), "ddp"),
    "pp4": (Mesh(pp=4), "ddp"),
}
"""The peers' names of meshes, with the mesh and strategy that each stands for in mpar."""


def hf_config(cfg: Any, workload: ModuleType) -> dict[str, Any]:
    """The config.json of the peers' model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": cfg.d,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.seq,
        "rms_norm_eps": workload.NORM_EPS,
        "rope_theta": workload.ROPE_THETA,
        "tie_word_embeddings": False,
    }


def build_model(cfg: Any, workload: ModuleType) -> models.Model:
    """mpar's model with the shapes of the peers' config."""
    return models.from_config(hf_config(cfg, workload))


def peers_optimizer(workload: ModuleType) -> AdamW:
    """AdamW with the peers' parameters and clipping."""
    return AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="all", clip_norm=workload.CLIP)


def compile_workload(cfg: Any, workload: ModuleType, mesh: str, strategy: str | None = None, **options: Any) -> Program:
    """The peers' training step, compiled for one of the peers' meshes, with another strategy than its own if one is given;
    `options` are those of `compile_step`.
    """
    shape, own = MESHES[mesh]
    strategy = strategy or own
    return compile_step(build_model(cfg, workload), peers_optimizer(workload), shape, strategy, (cfg.batch, cfg.seq), **options)


def initial_params(cfg: Any, workload: ModuleType) -> dict[str, torch.Tensor]:
    """The peers' initial weights by mpar's paths, as global tensors; they are read from files of a Hugging Face folder."""
    peer = workload.init_(workload.Llama(cfg))
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n if n.startswith("lm_head") else f"model.{n}": p.detach() for n, p in peer.named_parameters()}
        save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(cfg, workload)))
        _, params = models.from_hf(folder)
    return dict(tree.leaves_with_path(params))


def save_workload(folder: Path, cfg: Any, workload: ModuleType, mesh: str, **options: Any) -> Program:
    """Compile, and write `program.pickle` and `params.pt` for ranks, which do not load the compiler."""
    program = compile_workload(cfg, workload, mesh, **options)
    (folder / "program.pickle").write_bytes(pickle.dumps(program))
    torch.save(initial_params(cfg, workload), folder / "params.pt")
    return program
