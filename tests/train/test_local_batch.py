"""What a rank reads of a batch, and what it keeps of that."""

import threading
from collections import defaultdict

import pytest
import torch

from mpar.arrange import sequence_order
from mpar.cli._compose import compose_config
from mpar.errors import DataError
from mpar.models import with_next_tokens
from mpar.program import Program, batch_rows, rows_of
from mpar.shards import shard
from mpar.train import TrainConfig, load_data, make_setup
from mpar.train._local_batch import LocalBatches
from mpar.train.compile import compile_program
from tests.train.conftest import SMALL

CPU = torch.device("cpu")
HOWS = {
    "data": ["mesh=fsdp2_tp2", "strategy=zero3_tp_sp"],
    "microbatches": ["mesh=dp2_fsdp2", "strategy=ddp", "schedule.num_microbatches=2", "data.batch_size=8"],
    "stages": ["mesh=pp2_dp2", "strategy=ddp", "model.config.num_hidden_layers=2"],
    "zigzag": ["mesh=dp2_cp2", "strategy=zero3", "strategy.context_parallel=ring"],
    "slices": ["mesh=fsdp2_cp2", "strategy=zero3", "schedule.num_slices=2", "recompute=full"],
    "weights": [
        "model=tiny_deepseek_v3",
        "model.mtp_loss_weight=0.1",
        "mesh=cp2",
        "strategy=zero3",
        "data.token_weights=all+hermes",
    ],
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
        part = LocalBatches(program, batches, rank, CPU, next_tokens=further).read(1)
        expected = dealt_out(program, whole, rank)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[key], expected[key]) for key in expected)
        assert all(torch.equal(value, part[key]) for key, value in batch_rows(program, whole, rank).items())
        assert read == [list(rows_of(program, rank))]
        for row in read[0]:
            ranks_of_row[row] += 1
    sharing = program.mesh.size // program.mesh.axis_size(("dp", "fsdp"))
    assert set(ranks_of_row.values()) == {sharing}


def a_run():
    """A program of four ranks and the batches of its data."""
    setup = make_setup(compose_config("train", TrainConfig, [*SMALL, *HOWS["data"]])[0])
    return compile_program(setup), load_data(setup).training


def test_the_next_batch_is_read_while_one_is_worked_on():
    """It is there before it is asked for, and has the bits of what is read alone; none is read beyond the last."""
    program, batches = a_run()
    alone = LocalBatches(program, batches, 1, CPU)
    expected = {step: alone.read(step) for step in (4, 5, 6)}
    readers, arrived, rows = {}, defaultdict(threading.Event), batches.rows

    def noted(step, chosen):
        readers[step] = threading.current_thread()
        try:
            return rows(step, chosen)
        finally:
            arrived[step].set()

    batches.rows = noted
    with LocalBatches(program, batches, 1, CPU) as local:
        for step, following in ((4, 5), (5, 6), (6, None)):
            part = local.take(step, following)
            assert following is None or arrived[following].wait(timeout=60)
            assert all(torch.equal(part[key], expected[step][key]) for key in expected[step])
    assert list(readers) == [4, 5, 6]
    assert [reader is threading.main_thread() for reader in readers.values()] == [True, False, False]


def test_what_cannot_be_read_ahead_fails_when_it_is_needed():
    """The step before it runs to its end; to ask for another batch than the one that was read is allowed."""
    program, batches = a_run()
    rows = batches.rows

    def broken(step, chosen):
        if step == 1:
            raise DataError("cannot read row 7")
        return rows(step, chosen)

    batches.rows = broken
    with LocalBatches(program, batches, 0, CPU) as local:
        local.take(0, following=1)
        with pytest.raises(DataError, match="row 7"):
            local.take(1, following=2)
        assert local.take(3, following=None).keys() == local.take(4, following=None).keys()
