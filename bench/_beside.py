"""mpar beside torch in the same processes: lines and a table of variants named `program:method`."""

import json
import pickle
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench._launch import launch
from bench._machine import machine
from bench._rank import make_step
from bench._statistics import paired_ratio
from bench.spmd._run import check_losses
from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.strategy import Strategy

__all__ = ["OURS", "launched", "program_step", "save_program", "summarise", "table"]

OURS = {"mpar": None, "mpar_gloo": "backend"}
"""Names of our programs, and the transport they are bound with: shared memory where there is one, or gloo's collectives."""


def save_program(path: Path, model: models.Model, mesh: Mesh, strategy: Strategy, cfg: Any, clip: float, **how: Any) -> None:
    """Compile the peers' training step for ranks that load no compiler; `how` is what else `compile_step` takes."""
    optimizer = AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="all", clip_norm=clip)
    path.write_bytes(pickle.dumps(compile_step(model, optimizer, mesh, strategy, (cfg.batch, cfg.seq), **how)))


def program_step(name: str, folder: Path, workload: ModuleType, cfg: Any, rank: int) -> Callable[[], torch.Tensor]:
    """The step of `mpar:method` or `mpar_gloo:method`, from `method.pickle` (with a space for a slash) and `params.pt`."""
    who, _, method = name.partition(":")
    program = pickle.loads((folder / f"{method.replace('/', ' ')}.pickle").read_bytes())
    return make_step(program, torch.load(folder / "params.pt", mmap=True), workload, cfg, rank, OURS[who])


def launched(
    ranks: int, module: str, save: Callable[[Path], None], arguments: Mapping[str, Any], passes: int, launches: int
) -> list[dict[str, Any]]:
    """What rank 0 measured, a dict for each pass, in `launches` sets of processes that find what `save(folder)` left."""
    with tempfile.TemporaryDirectory() as work:
        save(Path(work))
        values = {"work": work, **arguments, "passes": -(-passes // launches)}
        args = [word for key, value in values.items() for word in (f"--{key}", str(value))]
        printed = [launch(ranks, module, args) for _ in range(launches)]
    return [json.loads(line) for text in printed for line in text.splitlines()]


def summarise(
    measured: Sequence[dict[str, Any]], pairs: Mapping[str, Sequence[str]], facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One line a variant; `pairs` maps ours to the peers that it is compared with. Raises LossesDiffer."""
    names = list(measured[0]["ranks"][0])

    def columns(name: str, key: str, over_ranks: Callable) -> list[list[float]]:
        return [[over_ranks(values) for values in zip(*(rank[name][key] for rank in p["ranks"]), strict=True)] for p in measured]

    losses = {name: columns(name, "loss", statistics.fmean) for name in names}
    spread = max(check_losses({name: losses[name][i] for name in names}) for i in range(len(measured)))
    wall, cpu = ({name: columns(name, key, over) for name in names} for key, over in (("wall", max), ("cpu", sum)))
    about = {**facts, "loss_spread": spread, "foreign_cores": [p["foreign_cores"] for p in measured]} | machine()
    lines = []
    for name in names:
        middle = {key: statistics.median(x for p in table[name] for x in p) for key, table in (("wall", wall), ("cpu", cpu))}
        line: dict[str, Any] = {"variant": name, "median_ms": round(1e3 * middle["wall"], 3)}
        line |= {"cpu_ms": round(1e3 * middle["cpu"], 3), "last_loss": losses[name][0][-1], "over": {}}
        for theirs in (peer for peer in pairs.get(name, ()) if peer in names):
            line["over"][theirs] = {}
            for key, table in (("wall", wall), ("cpu", cpu)):
                ratio = paired_ratio(table[name], table[theirs])
                line["over"][theirs][key] = [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)]
                line["pairs"], line["passes"] = ratio.count, ratio.passes
        lines.append(line | about)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one row for each variant, and one more for each further peer that it is compared with."""
    rows = [
        "| ranks | config | variant | ms | CPU ms, all ranks | peer | this / peer, wall (95 %) | this / peer, CPU (95 %) "
        "| pairs, passes | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        foreign = "/".join(f"{x:.1f}" for x in line["foreign_cores"])
        start = (str(line["ranks"]), line["config"], line["variant"], f"{line['median_ms']:.1f}", f"{line['cpu_ms']:.1f}")
        for theirs, ratios in (line["over"] or {"": {}}).items():
            shown = (_shown(ratios.get(key)) for key in ("wall", "cpu"))
            pairs = f"{line['pairs']}, {line['passes']}" if theirs else ""
            rows.append(f"| {' | '.join((*start, theirs, *shown, pairs, foreign))} |")
    return "\n".join(rows) + "\n"


def _shown(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"
