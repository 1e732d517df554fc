"""One of two processes: answers requests and scores texts on several meshes; each rank writes what it found.

usage: torchrun --nproc-per-node 2 runner_worker.py FOLDER
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

from mpar import Mesh, models
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner
from tests.models.variants import BASE

__all__ = ["MESHES", "found_on"]

MESHES = {"tp": (Mesh(tp=2), "tp"), "pp": (Mesh(pp=2), "tp"), "fsdp": (Mesh(fsdp=2), "zero3"), "cp": (Mesh(cp=2), "zero3")}
PROMPTS = [[1, 5, 2], [7], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18], [4] * 9]


def found_on(mesh: Mesh | None = None, strategy: str = "tp") -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers, and log-probabilities of the prompts, on a mesh; None: in this process alone."""
    model = models.build("llama", {**BASE, "initializer_range": 0.4})
    groups = 2 if mesh is not None and mesh.axis_size("fsdp") == 2 else 1
    sizes = Sizes(rows=4, tokens=8, pages=24, page_size=4, length=32, groups=groups)
    runner = ProgramRunner(model, model.init(0), sizes, mesh, strategy)
    engine = Engine(runner)
    requests = [engine.add(prompt, Sampling(temperature=0.0, max_tokens=10)) for prompt in PROMPTS]
    for _ in engine.run():
        pass
    scores = runner.scores([torch.tensor(prompt) for prompt in PROMPTS if len(prompt) > 1], 1)
    return [[chosen.token for chosen in request.chosen] for request in requests], [s.logprobs_S.tolist() for s in scores]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, how in MESHES.items():
        (pathlib.Path(sys.argv[1]) / f"{name}{dist.get_rank()}.json").write_text(json.dumps(found_on(*how)))
    dist.destroy_process_group()
