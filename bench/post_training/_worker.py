"""One rank of a launch: mpar, the peer of its case, and the products of the peer's step alone take one turn each."""

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench._rank import local_state
from bench._turns import Rank, joined, run_passes
from bench.post_training._subject import CLIP_NORM, SETTINGS, packed, pairs
from mpar.models.traced import load_transformers
from mpar.program import batch_rows

__all__ = ["main"]


def _mpar(rank: Rank) -> Callable[[], torch.Tensor]:
    """The step of the program, on the batches that the peer has."""
    program = pickle.loads((rank.work / "program.pickle").read_bytes())
    cfg = rank.workload.CONFIGS[rank.args.config]
    run, state = program.bind(), [local_state(program, torch.load(rank.work / "params.pt"), rank.rank)]
    if rank.args.case == "lora":
        data = ({"tokens": tokens, "labels": labels} for tokens, labels in rank.workload.batches(cfg))
    else:
        data = (packed(step, cfg) for step in pairs(cfg, cfg.batch // 2, rank.args.lengths == "equal"))

    def step() -> torch.Tensor:
        state[0], metrics = run(state[0], batch_rows(program, next(data), rank.rank))
        return metrics["loss"]

    return step


def _peft(rank: Rank) -> Callable[[], torch.Tensor]:
    """The step of transformers' model with PEFT's adapter, its layers sharded by FSDP2."""
    import peft

    base = load_transformers().AutoModelForCausalLM.from_pretrained(rank.work / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, rank.work / "adapter", is_trainable=True).train()
    if rank.num_ranks > 1:
        mesh = init_device_mesh("cpu", (rank.num_ranks,))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **SETTINGS, fused=True)
    data = rank.workload.batches(rank.workload.CONFIGS[rank.args.config])

    def step() -> torch.Tensor:
        tokens, labels = (x.chunk(rank.num_ranks)[rank.rank] for x in next(data))
        loss = F.cross_entropy(model(input_ids=tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / rank.num_ranks
        if rank.num_ranks > 1:
            torch.distributed.all_reduce(mean)
        return mean

    return step


def _trl(rank: Rank) -> Callable[[], torch.Tensor]:
    """The step of TRL's DPOTrainer as a launch without options makes it: on several ranks each has all parameters (DDP)."""
    from bench.post_training._trl import trl_step

    cfg, args = rank.workload.CONFIGS[rank.args.config], rank.args
    made = pairs(cfg, cfg.batch // 2, args.lengths == "equal")
    rows = [row for step in itertools.islice(made, args.warmup + args.steps * args.passes + 4) for row in step]
    per_rank = cfg.batch // 2 // rank.num_ranks
    return trl_step(rank, rows, per_rank, args.case == "dpo_lora", Path(rank.work) / f"trl{rank.rank}")


def main() -> None:
    """Entry of one rank."""
    rank = joined(texts=["case", "lengths"])
    made = {"mpar": _mpar, "peft": _peft, "trl": _trl}
    run_passes({name: made[name](rank) for name in rank.variants}, rank)


if __name__ == "__main__":
    main()
