"""Log-probabilities of a reference model: computed once, kept, and read by a run that goes on, whose parameters are others."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mpar.cli._compose import compose_config
from mpar.errors import CheckpointError
from mpar.train import Reference, RunData, TrainConfig, Watch, load_data, make_setup, with_reference
from mpar.train.compile import compile_reference
from tests.train.conftest import SMALL
from tests.train.test_health import alone

DPO = [*SMALL, "task=dpo", "task.reference=columns", "data=preferences", "data.sources=[preferences#8]", "data.seq_len=192"]
ONE = ["data.truncation=right", "mesh=one", "strategy=ddp", "steps=2"]


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Reference, RunData]:
    """A run that begins, and its data without the log-probabilities."""
    config, _ = compose_config("train", TrainConfig, [*DPO, *ONE, f"run_dir={tmp_path}"])
    setup = make_setup(config)
    with Watch(tmp_path / "place") as watch:
        yield Reference(setup, compile_reference(setup), 0, torch.device("cpu"), watch, alone), load_data(setup)


def logps(data: RunData) -> np.ndarray:
    """What the batches to train on have."""
    found = data.training.documents.reference_logps
    assert found is not None
    return found


def test_a_run_that_goes_on_reads_what_it_began_with(begun):
    """What the file has counts, not what the present parameters or those of the beginning would give; without it a run from
    parameters of another folder is refused, and the file is named."""
    reference, data = begun
    first = logps(with_reference(reference, data))
    assert len(np.unique(first)) > 8
    (file,) = reference.folders[0].glob("*.npy")
    np.save(file, first - 1)
    going_on = replace(reference, resumes=True)
    assert np.array_equal(logps(with_reference(going_on, data)), first - 1)
    config = replace(reference.setup.config, init_from="elsewhere")
    of_others = replace(going_on, setup=replace(reference.setup, config=config), init=None)
    assert np.array_equal(logps(with_reference(of_others, data)), first - 1)
    for damage in (lambda: np.save(file, first[1:]), lambda: file.write_bytes(b"x"), file.unlink):
        damage()
        with pytest.raises(CheckpointError, match=rf"cannot go on: .*{file.parent.name}/.* is missing or damaged.*\nRestore it"):
            with_reference(of_others, data)
    assert np.array_equal(logps(with_reference(going_on, data)), first)  # fresh parameters are drawn again
