"""One rank of a launch: all ways of spreading a subject take one step each in turn. Rank 0 prints the times."""

import pickle

import torch
import torch.distributed as dist

from bench._rank import make_step
from bench._turns import Rank, joined, run_passes
from bench.parallel._subject import OURS, Config, Step
from bench.parallel._subjects import SUBJECTS

__all__ = ["main", "program_file"]


def program_file(method: str) -> str:
    """The name of the file in which the launcher leaves the program of a method."""
    return f"{method.replace('/', ' ')}.pickle"


def _our_step(variant: str, rank: Rank, cfg: Config) -> Step:
    who, _, method = variant.partition(":")
    program = pickle.loads((rank.work / program_file(method)).read_bytes())
    params = torch.load(rank.work / "params.pt", mmap=True)
    return make_step(program, params, rank.workload, cfg, rank.rank, OURS[who])


def main() -> None:
    """Entry of one rank."""
    sizes = sorted({name for subject in SUBJECTS.values() for name in subject.sizes})
    rank = joined(texts=["subject"], optional=sizes)
    subject = SUBJECTS[rank.args.subject]
    cfg = subject.config(rank.workload.CONFIGS[rank.args.config], {name: int(vars(rank.args)[name]) for name in subject.sizes})
    steps = {}
    for variant in rank.variants:
        if variant.partition(":")[0] in OURS:
            steps[variant] = _our_step(variant, rank, cfg)
        else:
            steps[variant] = subject.torch_step(rank.workload, cfg, variant, rank.num_ranks)
    dist.barrier()
    run_passes(steps, rank)


if __name__ == "__main__":
    main()
