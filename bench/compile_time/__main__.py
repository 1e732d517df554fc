"""`python -m bench.compile_time [--case nano ...] [--traced]`: seconds, nodes and instructions, each case in a fresh process."""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench._machine import ROOT, this_run
from bench._result import RESULTS, Json, Result, append_results
from mpar import models
from mpar.mesh import Mesh
from mpar.models import traced
from mpar.optim import AdamW
from mpar.program.compile import compile_step

SHAPES = {  # d, layers, heads, kv heads, head size, ffn, vocabulary, sequence
    "nano": (128, 4, 8, 4, 16, 344, 512, 64),
    "tiny": (256, 4, 8, 4, 32, 688, 2048, 256),
    "small": (512, 8, 8, 4, 64, 1376, 8192, 512),
    "llama3_8b": (4096, 32, 32, 8, 128, 14336, 128256, 8192),
    "llama3_70b": (8192, 80, 64, 8, 128, 28672, 128256, 8192),
    "llama3_405b": (16384, 126, 128, 8, 128, 53248, 128256, 8192),
}

CASES = {  # model, mesh, strategy, rows of the global batch
    "nano": ("nano", Mesh(tp=4), "tp_sp", 8),
    "tiny": ("tiny", Mesh(fsdp=2, tp=2), "zero3_tp_sp", 8),
    "small": ("small", Mesh(fsdp=4), "zero3", 8),
    "llama3_8b": ("llama3_8b", Mesh(fsdp=64, tp=8), "zero3_tp_sp", 64),
    "llama3_70b": ("llama3_70b", Mesh(fsdp=128, tp=8), "zero3_tp_sp", 128),
    "llama3_405b_small_mesh": ("llama3_405b", Mesh(fsdp=2, tp=8), "zero3_tp_sp", 2),
    "llama3_405b": ("llama3_405b", Mesh(fsdp=2048, tp=8), "zero3_tp_sp", 2048),
}


def measure(name: str, *, traced_model: bool) -> dict[str, Json]:
    """Compile one case in this process, which has loaded the compiler and transformers' code of the model, but traced nothing."""
    shape, mesh, strategy, rows = CASES[name]
    d, layers, heads, kv_heads, head_dim, ffn, vocab, seq = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": seq,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if traced_model:
        importlib.import_module("transformers.models.llama.modeling_llama")
        importlib.import_module("transformers.models.auto.modeling_auto")
    begun = time.process_time()
    model = models.from_config(config)
    if traced_model:
        raw = json.dumps(config)
        model = traced.TracedModel(raw, torch.float32, None, traced.kept_check(raw))
        len(model.segments)
    import_cpu_s, begun_cpu = time.process_time() - begun, time.process_time()
    begun = time.perf_counter()
    program = compile_step(model, AdamW(lr=3e-4), mesh, strategy, (rows, seq))
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    return {
        "case": name,
        "ranks": mesh.size,
        "compile_s": round(seconds, 2),
        "compile_cpu_s": round(cpu_s, 2),
        "import_cpu_s": round(import_cpu_s, 2),
        "traced": traced_model,
        "peak_rss_mb": round(peak),
        "nodes": sum(kind.num_nodes for kind in program.kinds.values()),
        "kinds": len(program.kinds),
        "instructions": len(program.instructions),
    }


def main() -> int:
    """Measure every case in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--here", action="store_true", help="measure one case in this process")
    parser.add_argument("--traced", action="store_true", help="models that are traced from transformers instead of declared")
    parser.add_argument("--out", type=Path, default=RESULTS / "compile_time.jsonl")
    args = parser.parse_args()
    if args.here:
        sys.stdout.write(json.dumps(measure(args.case[0], traced_model=args.traced)) + "\n")
        return 0
    for name in args.case:
        command = [sys.executable, "-m", "bench.compile_time", "--case", name, "--here", *(["--traced"] if args.traced else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr[-3000:])
            return 1
        line = json.loads(done.stdout)
        append_results(args.out, [Result.of(line, this_run())])
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
