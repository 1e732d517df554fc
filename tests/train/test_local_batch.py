"""What a rank reads of a batch, and what it keeps of that."""

import pytest
import torch

from mpar.arrange import sequence_order
from mpar.cli._compose import compose_config
from mpar.models import with_next_tokens
from mpar.program import Program, batch_rows, rows_of
from mpar.shards import shard
from mpar.train import TrainConfig, load_data, make_setup
from mpar.train._local_batch import local_batch
from mpar.train.compile import compile_program
from tests.train.conftest import SMALL

HOWS = {
    "data": ["mesh=fsdp2_tp2", "strategy=zero3_tp_sp"],
    "microbatches": ["mesh=dp2_fsdp2", "strategy=ddp", "schedule.num_microbatches=2", "data.batch_size=8"],
    "stages": ["mesh=pp2_dp2", "strategy=ddp", "model.config.num_hidden_layers=2"],
    "zigzag": ["mesh=dp2_cp2", "strategy=zero3", "strategy.context_parallel=ring"],
    "slices": ["mesh=fsdp2_cp2", "strategy=zero3", "schedule.num_slices=2", "recompute=full"],
    "next tokens": ["model=tiny_deepseek_v3", "model.mtp_loss_weight=0.1", "mesh=fsdp2_cp2", "strategy=zero3"],
}


def dealt_out(program: Program, batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The part of `rank` by the definition: every microbatch's slices are placed as the program says, one after the other."""
    leaves = {leaf.path.removesuffix(".0"): leaf for leaf in program.batch if leaf.path.endswith(".0")}
    if "order" in leaves:
        own = sequence_order(len(batch["tokens"][0]) // program.num_slices, program.order_parts)
        order = torch.cat([own + piece * len(own) for piece in range(program.num_slices)])
        batch = {key: value[:, order] for key, value in batch.items()} | {"order": order}
    pieces = {key: batch[key].split(leaf.shape[0]) for key, leaf in leaves.items()}
    for key, leaf in leaves.items():
        if len(leaf.shape) > 1:
            pieces[key] = [piece for rows in pieces[key] for piece in rows.split(leaf.shape[1], 1)]
    return {key: torch.cat([shard(piece, leaves[key].spec, program.mesh, rank) for piece in pieces[key]]) for key in leaves}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_rank_reads_its_rows_alone(how):
    """Every rank's part has the bits of what is dealt out of the global batch, and it asked for no row but its own."""
    small = [word for word in SMALL if not (word.startswith("model.") and "model=tiny_deepseek_v3" in how)]
    config = compose_config("train", TrainConfig, [*small, *how])[0]
    setup = make_setup(config)
    program, batches = compile_program(setup), load_data(setup).training
    further = bool(setup.model.next_keys)
    whole = with_next_tokens(batches.batch(1)) if further else batches.batch(1)
    ranks_of_row = dict.fromkeys(range(batches.shape.batch_size), 0)
    read: list[list[int]] = []
    rows = batches.rows
    batches.rows = lambda step, chosen: read.append(list(chosen)) or rows(step, chosen)
    for rank in range(program.mesh.size):
        read.clear()
        part = local_batch(program, batches, 1, rank, torch.device("cpu"), next_tokens=further)
        expected = dealt_out(program, whole, rank)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[key], expected[key]) for key in expected)
        assert all(torch.equal(value, part[key]) for key, value in batch_rows(program, whole, rank).items())
        assert read == [list(rows_of(program, rank))]
        for row in read[0]:
            ranks_of_row[row] += 1
    sharing = program.mesh.size // program.mesh.axis_size(("dp", "fsdp"))
    assert set(ranks_of_row.values()) == {sharing}
