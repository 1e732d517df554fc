"""When a run saves, what, and whether copies of the same values agree."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpar import checkpoint
from mpar.errors import CheckpointError, NumericsError
from mpar.train import Progress, Saving, Watch, fresh_state, load_state, make_setup
from mpar.train._replicas import bit_sum
from tests.processes import PATIENCE_S

CPU = torch.device("cpu")


class Ranks:
    """Four ranks as threads, each with its Saving and its state."""

    def __init__(self, config, program, run_dir, **options):
        group = dataclasses.replace(config.checkpoint, **options)
        self.config = dataclasses.replace(config, checkpoint=group, run_dir=str(run_dir), steps=9, timeout_s=PATIENCE_S)
        self.program, self.said = program, []
        self._meeting, self._values = threading.Barrier(4, timeout=PATIENCE_S), {}
        model = make_setup(config).model
        self.states = [fresh_state(program, model, rank, seed=3, source=None, device=CPU) for rank in range(4)]
        watches = [Watch(run_dir / f"{rank}.place") for rank in range(4)]
        self.saving = self.on_all(
            lambda rank: Saving(self.config, {}, program, rank, CPU, self._agree(rank), watches[rank], self.said.append)
        )

    def _agree(self, rank):
        def agree(values):
            self._values[rank] = values
            self._meeting.wait()
            highest = [max(column) for column in zip(*self._values.values(), strict=True)]
            self._meeting.wait()
            return highest

        return agree

    def on_all(self, call):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(call, range(4)))

    def after_step(self, step, *, eval_loss=None, last=False):
        progress = Progress(step, 100 * step, "data", 0)

        def call(rank):
            try:
                self.saving[rank].after_step(self.states[rank], progress, eval_loss, last=last)
            except (CheckpointError, NumericsError) as error:
                return error
            return None

        return self.on_all(call)

    def steps(self):
        return [int(path.name[5:]) for path in checkpoint.available(self.config.run_dir + "/checkpoints")]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_when_a_run_saves(mode, config, program, tmp_path):
    """After every second step and the last, in either mode; the last is on the disk when `after_step` returns. The checkpoint has
    the state of its step, and how long training stood still is told once."""
    ranks = Ranks(config, program, tmp_path, every=2, keep=None, mode=mode)
    for step in (1, 2, 3, 4, 5):
        assert ranks.after_step(step, last=step == 5) == [None] * 4
        assert (ranks.saving[0].stalled_s() is not None) == (step in (2, 4, 5))
        assert mode == "async" or ranks.steps() == [s for s in (2, 4, 5) if s <= step]
    assert ranks.steps() == [2, 4, 5]
    for rank in range(4):
        state, progress = load_state(program, tmp_path / "checkpoints" / "step_00000004", rank, CPU)
        assert progress == Progress(4, 400, "data", 0)
        assert all(torch.equal(x, ranks.states[rank].leaves[path]) for path, x in state.leaves.items())
    ranks.on_all(lambda rank: ranks.saving[rank].__exit__(None, None, None))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step_0000000{step}" for step in (2, 4, 5)]


def test_parameters_only(config, program, tmp_path):
    """Without the optimizer's state the checkpoint has the parameters; going on from it is refused with the reason."""
    ranks = Ranks(config, program, tmp_path, every=None, optimizer_state=False)
    assert ranks.after_step(1, last=True) == [None] * 4
    path = checkpoint.latest(tmp_path / "checkpoints")
    names = {leaf.path for leaf in program.state_out}
    assert set(checkpoint.names(path)) == {name for name in names if name.startswith("params.")} != names
    with pytest.raises(CheckpointError, match=r"parameters only, since it was saved with checkpoint.optimizer_state=false"):
        load_state(program, path, 0, CPU)


def test_the_best_is_kept(config, program, tmp_path):
    """The evaluation loss goes into the checkpoint, and decides."""
    ranks = Ranks(config, program, tmp_path, every=1, keep=1, keep_best=1)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        ranks.after_step(step, eval_loss=loss, last=step == 3)
    assert ranks.steps() == [2, 3]
    assert checkpoint.read_extras(tmp_path / "checkpoints" / "step_00000002")["eval_loss"] == 1.0


def test_a_step_with_a_nan_is_not_saved(config, program, tmp_path):
    """All ranks stop with the name of the tensor, after the step or after a later one; the checkpoint before stays."""
    ranks = Ranks(config, program, tmp_path, every=1, mode="sync")
    ranks.after_step(1)
    name = next(iter(ranks.states[2].leaves))
    ranks.states[2].leaves[name].view(-1)[-1] = torch.nan
    errors = ranks.after_step(2)
    assert all(isinstance(error, NumericsError) and name in str(error) and "step_00000002" in str(error) for error in errors)
    assert ranks.steps() == [1]


def test_replicas(config, program, tmp_path):
    """Equal copies pass; one flipped bit in a copy of a norm's gain, which all four ranks have, is found on that rank, before
    the step is saved."""
    ranks = Ranks(config, program, tmp_path, every=1, mode="sync", check_replicas=2)
    sizes = program.mesh.sizes
    everywhere = [leaf.path for leaf in program.state_out if not leaf.spec.axes]
    pairs = [leaf.path for leaf in program.state_out if leaf.spec.axes == ("fsdp",) and sizes["tp"] == 2]
    assert ranks.after_step(1) + ranks.after_step(2) == [None] * 8
    for path, words in [(everywhere[0], r"rank 2 against 3 others")] if everywhere else [(pairs[0], "none has a majority")]:
        bits = ranks.states[2].leaves[path].view(-1).view(torch.int32)
        bits[0] ^= 1
        errors = ranks.after_step(4)
        assert all(isinstance(error, NumericsError) and path in str(error) for error in errors), errors
        assert words in str(errors[0])
        bits[0] ^= 1
    assert ranks.steps() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_every_flipped_bit_changes_the_sum(dtype):
    """Wherever it is, also behind the last whole word, and in a tensor that does not begin at one."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (4 + 20,), dtype=torch.uint8, generator=generator)
    x = raw.view(dtype)[4 // dtype.itemsize :]
    before = bit_sum(x)
    for byte in range(4, len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert bit_sum(x) != before
            raw[byte] ^= 1 << bit
    assert bit_sum(x) == before < 2**52
