"""A rank other than 0 of a model that answers: it loads its part of the model and does what rank 0 does.

The command starts `python -m mpar.cli._follower FOLDER` for each of them.
"""

import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.distributed as dist

from mpar.cli._answering import AnswerKeys, ChoiceKeys, load
from mpar.cli._bind import bind
from mpar.cli._failures import write_failure
from mpar.cli._signals import ignore_signals
from mpar.infer.run import follow
from mpar.parent_process import end_with_parent

__all__ = ["main", "meet", "write_request"]

_REQUEST = "request.json"
_LOOPBACK = "lo"


def write_request(job: Path, config: AnswerKeys, folder: Path) -> None:
    """Write into the private folder `job` which model the ranks load, and how."""
    given = asdict(config)
    keys = {field.name: given[field.name] for field in fields(ChoiceKeys) if field.name in given}
    (job / _REQUEST).write_text(json.dumps([str(folder.absolute()), keys]), encoding="utf-8")


def meet(job: Path, rank: int, size: int) -> None:
    """Join the process group of the ranks of this job; cores are divided among them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", store=dist.FileStore(str(job / "store"), size), rank=rank, world_size=size)


def main(args: list[str]) -> int:
    """Follow rank 0 of the job in the folder `args[0]`; a rank that fails leaves its reason there and ends with 1."""
    end_with_parent(os.getppid())
    ignore_signals()  # rank 0 gets them, and ends this process when everything is done
    job, rank, size = Path(args[0]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        folder, keys = json.loads((job / _REQUEST).read_text(encoding="utf-8"))
        meet(job, rank, size)
        _, assistant = load(bind(ChoiceKeys, keys), Path(folder))
        follow(assistant.engine.runner)
        dist.destroy_process_group()
    except BaseException as error:
        write_failure(job, rank, error)
        sys.stderr.flush()
        os._exit(1)  # sys.exit would wait for threads of the backend, which may wait for a rank that is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
