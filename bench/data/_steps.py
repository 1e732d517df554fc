"""Steps of `tiny` that take their batches from a stream, each beside the same step with the same batch from memory."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from bench._machine import ROOT
from mpar import Mesh, compile_step, models
from mpar.data import Batches, DataConfig, Tokenizer, load_dataset
from mpar.optim import AdamW
from mpar.program import batch_rows
from mpar.train._local_batch import LocalBatches

__all__ = ["measured_steps"]

_SEQ_LEN, _ROWS, _VOCABULARY = 256, 8, 16_384
_SHUFFLE_ROWS = 100  # a block is read every fifteen steps or so, so that reading it is measured too
_WARM_STEPS = 5

Pairs = dict[str, list[float]]


def measured_steps(folder: Path, count: int) -> dict[str, Pairs]:
    """For `stream` and `memory`: wall seconds, CPU seconds of this process, and seconds of waiting for the batch, of `count`
    steps that one program takes in turn with both, behind the first few. What a run does with a stream in each step is measured:
    a thread reads the next batch, and the rows of each source are counted, with the cursor of the next step."""
    torch.set_num_threads(1)
    wanted = DataConfig(
        kind="pt", sources=(str(folder / "corpus.jsonl"),), batch_size=_ROWS, seq_len=_SEQ_LEN, stream=True,
        shuffle_rows=_SHUFFLE_ROWS,
    )  # fmt: skip
    tokenizer, total = Tokenizer.from_folder(folder / "tokenizer"), _WARM_STEPS + count
    before, stream = (load_dataset(wanted, tokenizer, vocab_size=_VOCABULARY) for _ in range(2))
    config = yaml.safe_load((ROOT / "conf/model/tiny_qwen3.yaml").read_text())["config"]
    model = models.from_config(config | {"vocab_size": _VOCABULARY})
    program = compile_step(model, AdamW(lr=1e-3), Mesh(dp=1), "ddp", (_ROWS, _SEQ_LEN))
    run, params = program.bind(), model.init(0)
    states = {kind: program.init_state(params) for kind in ("stream", "memory")}
    kept = [batch_rows(program, _named(before.batch(step), program.facts.batch), 0) for step in range(total)]
    before.close()
    found: dict[str, Pairs] = {kind: {"wall": [], "cpu": [], "data": []} for kind in states}
    with LocalBatches(program, stream, 0, torch.device("cpu")) as local:
        read: dict[str, Callable[[int], dict[str, Tensor]]] = {
            "stream": lambda step: local.take(step, step + 1),
            "memory": lambda step: kept[step],
        }
        for step in range(total):
            for kind in sorted(states, reverse=bool(step % 2)):
                began, cpu = time.perf_counter(), time.process_time()
                batch = read[kind](step)
                waited = time.perf_counter() - began
                states[kind], metrics = run(states[kind], batch)
                float(metrics["loss"])
                if kind == "stream":
                    _count(stream, step)
                spent = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu, "data": waited}
                if step >= _WARM_STEPS:
                    for name, seconds in spent.items():
                        found[kind][name].append(seconds)
                assert kind == "memory" or all(torch.equal(batch[name], kept[step][name]) for name in batch)
    stream.close()
    return found


def _named(batch: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name in names}


def _count(stream: Batches, step: int) -> None:
    """What a run records of the data behind each step."""
    stream.use(step)
    stream.cursor(step + 1)
