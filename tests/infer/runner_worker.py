"""One of two processes: answers requests on tp=2, pp=2 and cp=2; each rank writes its answers.

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

__all__ = ["MESHES", "answers_on"]

MESHES = {"tp": Mesh(tp=2), "pp": Mesh(pp=2), "cp": Mesh(cp=2)}
PROMPTS = [[1, 5, 2], [7], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18], [4] * 9]


def answers_on(mesh: Mesh | None) -> list[list[int]]:
    """Greedy answers on a mesh; None: in this process alone."""
    model = models.build("llama", {**BASE, "initializer_range": 0.4})
    sizes = Sizes(rows=3, tokens=8, pages=24, page_size=4, length=32)
    engine = Engine(ProgramRunner(model, model.init(0), sizes, mesh))
    requests = [engine.add(prompt, Sampling(temperature=0.0, max_tokens=10)) for prompt in PROMPTS]
    for _ in engine.run():
        pass
    return [[chosen.token for chosen in request.chosen] for request in requests]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, mesh in MESHES.items():
        (pathlib.Path(sys.argv[1]) / f"{name}{dist.get_rank()}.json").write_text(json.dumps(answers_on(mesh)))
    dist.destroy_process_group()
