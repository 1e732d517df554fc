"""Whether two states of the source train to the same bits: twelve short runs, half of them simulated, half on real processes.

    python -m tools.same_bits record before.json     # on one commit
    python -m tools.same_bits compare before.json    # on another commit, on the same machine: exits with 1 if a bit differs

A change that only moves or renames code must leave every loss and every parameter as it was. Bits depend on the processor and on
torch, so a record is made and compared on one machine, and is not part of the repository.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor

from mpar import Mesh, State, compile_step, models, tree
from mpar.optim import SGD, AdamW

VOCAB, ROWS, LENGTH, STEPS = 96, 8, 16, 3
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "rope_theta": 10000.0},
    "qwen3_tied": {**BASE, "model_type": "qwen3", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "qwen3_moe": {
        **BASE,
        "model_type": "qwen3_moe",
        "rope_theta": 10000.0,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "gemma2": {
        **BASE,
        "model_type": "gemma2",
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "tie_word_embeddings": True,
    },
}
SIMULATED: dict[str, dict[str, Any]] = {  # config, dtype, mesh, then arguments of compile_step
    "llama zero3_tp_sp": {"model": "llama", "mesh": {"fsdp": 2, "tp": 2}, "strategy": "zero3_tp_sp", "num_microbatches": 2},
    "llama pp4 interleaved bf16": {
        "model": "llama",
        "dtype": torch.float32,
        "mesh": {"pp": 2, "dp": 2},
        "strategy": "zero1",
        "schedule": "interleaved",
        "num_microbatches": 4,
        "precision": "bf16",
    },
    "qwen3 tied zbv": {
        "model": "qwen3_tied",
        "mesh": {"pp": 2, "tp": 2},
        "strategy": "tp_sp",
        "schedule": "zbv",
        "num_microbatches": 4,
    },
    "qwen3_moe cp2 fsdp2": {"model": "qwen3_moe", "mesh": {"fsdp": 2, "cp": 2}, "strategy": "zero3", "recompute": "full"},
    "gemma2 hsdp selective": {
        "model": "gemma2",
        "mesh": {"dp": 2, "fsdp": 2, "tp": 2},
        "strategy": "hsdp_tp",
        "recompute": "selective",
        "optimizer": SGD(lr=0.1, momentum=0.9),
    },
    "gpt2 slices dual_pipe_v": {
        "model": "gpt2",
        "mesh": {"pp": 2},
        "strategy": "ddp",
        "schedule": "dual_pipe_v",
        "num_microbatches": 4,
        "num_slices": 2,
    },
}
LAUNCHED: dict[str, list[str]] = {
    "tiny_llama zero3": ["model=tiny_llama", "mesh=fsdp2", "strategy=zero3"],
    "tiny_qwen3 pp2 zbv": ["model=tiny_qwen3", "mesh=pp2", "strategy=ddp", "schedule=zbv"],
    "tiny_qwen3_moe fsdp2_cp2": ["model=tiny_qwen3_moe", "mesh=fsdp2_cp2", "strategy=zero3", "strategy.expert_parallel=4"],
    "tiny_gemma3 tp2 bf16": ["model=tiny_gemma3", "mesh=tp2", "strategy=tp_sp", "precision=bf16", "recompute=selective"],
    "tiny_mamba2 dp2": ["model=tiny_mamba2", "mesh=dp2", "strategy=zero1", "mesh.dp=1", "mesh.fsdp=2"],
    "tiny_deepseek_v3 pp2_tp2": ["model=tiny_deepseek_v3", "mesh=pp2_tp2", "strategy=zero1_tp_sp", "schedule=one_f_one_b"],
}


def simulated(case: Mapping[str, Any]) -> dict[str, list[str]]:
    """Losses of a few steps, and hashes of the parameters after them, with all ranks simulated in this process."""
    case = dict(case)
    model = models.from_config(CONFIGS[case.pop("model")]).with_dtype(case.pop("dtype", torch.float64))
    optimizer = case.pop("optimizer", AdamW(lr=1e-2))
    mesh, strategy = Mesh(**case.pop("mesh")), case.pop("strategy")
    program = compile_step(model, optimizer, mesh, strategy, (ROWS, LENGTH), **case)
    state: State = program.init_state(model.init(0))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        state, metrics = program.simulate(state, {"tokens": rows[:, :-1], "labels": rows[:, 1:].contiguous()})
        losses.append(float(metrics["loss"]).hex())
    params = tree.leaves_with_path(state.params(model.abstract_params))
    return {"losses": losses, "parameters": [f"{path} {digest(x)}" for path, x in params]}


def launched(overrides: list[str], folder: Path) -> dict[str, list[str]]:
    """Losses and hashes of a run of `mpar train`."""
    command = [sys.executable, "-m", "mpar", "train", f"run_dir={folder}", "steps=6", "progress=false", "tensorboard=false"]
    done = subprocess.run([*command, "task.chat=[]", *overrides], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    weights = load_file(folder / "hf" / "model.safetensors")
    return {
        "losses": [float(record["loss"]).hex() for record in records if "loss" in record],
        "parameters": [f"{name} {digest(x)}" for name, x in sorted(weights.items())],
    }


def digest(x: Tensor) -> str:
    """A hash of the bits of a tensor."""
    return hashlib.sha256(x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def measure() -> dict[str, dict[str, list[str]]]:
    """The losses and hashes of every run, by its name."""
    torch.set_num_threads(1)
    found = {name: simulated(case) for name, case in track(SIMULATED.items(), "simulated")}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, overrides) in enumerate(track(LAUNCHED.items(), "launched ")):
            found[name] = launched(overrides, Path(folder) / str(number))
    return found


def main() -> int:
    """Record, or compare with a record. Returns 1 if a bit differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    found = measure()
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{len(found)} runs recorded in {args.file}")
        return 0
    expected = json.loads(args.file.read_text(encoding="utf-8"))
    differing = [name for name in expected if found.get(name) != expected[name]]
    for name in expected:
        loss = float.fromhex(expected[name]["losses"][-1])
        print(f"{'DIFFERS' if name in differing else 'same   '} {name}: last loss {loss:.6f}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
