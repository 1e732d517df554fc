"""`python -m bench.export_memory FOLDER`: memory and time of exporting a checkpoint that is larger than this memory may be.

Makes a checkpoint of random parameters in FOLDER, exports it with bfloat16, and exports it again as the checkpoint of a run that
started from that folder, so that its dtype is that of the source. Prints a line for each export.
"""

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mpar import checkpoint, tree
from mpar.cli._compose import compose_config
from mpar.data import byte_tokenizer
from mpar.mesh import Mesh
from mpar.spec import P
from mpar.train import TrainConfig, make_setup
from mpar.train.export import ExportOptions, export_hf

SLACK_BYTES = 300 * 10**6


def main() -> int:
    """Measure. Returns 1 if an export took more memory than 300 MB and its largest tensor."""
    parser = argparse.ArgumentParser(prog="python -m bench.export_memory")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=65536)
    args = parser.parse_args()
    sizes = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": args.hidden // 16,
        "vocab_size": args.vocab,
        "tie_word_embeddings": "false",
    }
    overrides = [f"model.config.{name}={value}" for name, value in sizes.items()]
    config, plain = compose_config("train", TrainConfig, overrides)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    path = write_checkpoint(config, plain, args.folder)
    lines = [measured(config, path, args.folder / "hf", "bfloat16")]
    from_folder = replace(config, model=replace(config.model, path=str(args.folder / "hf"), config=None))
    lines.append(measured(from_folder, path, args.folder / "again", "source"))
    sys.stdout.write("".join(json.dumps(line) + "\n" for line in lines))
    return int(any(line["over_bytes"] > line["bound_bytes"] for line in lines))


def write_checkpoint(config: TrainConfig, plain: dict, folder: Path) -> Path:
    """A checkpoint of the model of `config`, whose parameters are parts of one random buffer."""
    leaves = tree.leaves_with_path(make_setup(config).model.abstract_params)
    buffer = torch.randn(max(leaf.numel() for _, leaf in leaves))
    tensors = {f"params.{name}": buffer[: leaf.numel()].view(leaf.shape) for name, leaf in leaves}
    specs, shapes = dict.fromkeys(tensors, P()), {name: tuple(x.shape) for name, x in tensors.items()}
    extras = {"step": 1, "tokens": 0, "data": "", "seed": 0, "config": plain}
    return checkpoint.save(folder, 1, tensors, specs, Mesh(), 0, shapes, extras)


def measured(config: TrainConfig, path: Path, out: Path, dtype: str) -> dict[str, object]:
    """Export, and what it took: time, and the peak of anonymous memory above its value before."""
    largest = max(leaf.nbytes for leaf in tree.leaves(make_setup(config).model.abstract_params))
    began, before = time.perf_counter(), anonymous_bytes()
    with peak_of_memory() as peak:
        export_hf(config, byte_tokenizer(), path, out, ExportOptions(dtype))
    dtypes = json.loads((out / "config.json").read_text(encoding="utf-8"))["torch_dtype"]
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {
        "asked": dtype,
        "dtype": dtypes,
        "files": len(list(out.glob("*.safetensors"))),
        "written_bytes": written,
        "seconds": round(time.perf_counter() - began, 1),
        "over_bytes": peak[0] - before,
        "largest_tensor_bytes": largest,
        "bound_bytes": largest + SLACK_BYTES,
    }


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """A list whose only number is the peak of `anonymous_bytes` so far, seen every few milliseconds."""
    peak, done = [anonymous_bytes()], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
