"""Log-probabilities of a reference model, computed once by a program of forwards, and kept beside the data."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mpar.data import Batches, DocumentBatches
from mpar.errors import CheckpointError, DataError
from mpar.program import Program, State
from mpar.tasks import AnswerLogps, TaskChain
from mpar.train._local_batch import LocalBatches
from mpar.train._loop import first_state
from mpar.train._run_data import RunData
from mpar.train._setup import RunSetup
from mpar.train._sizes import num_microbatches
from mpar.train._watch import Watch

__all__ = ["Reference", "with_reference"]

_HEAD_BYTES = 2**20


@dataclass(frozen=True)
class Reference:
    """What a rank needs to find the log-probabilities of the reference model.

    program: of `mpar.tasks.AnswerLogps`. resumes: whether the run goes on, so that its folder has them, and the present
    parameters are no longer those of the reference model. init: see `first_state`. agree: see `Rank`.
    """

    setup: RunSetup
    program: Program
    rank: int
    device: torch.device
    watch: Watch
    agree: Callable[[list[float]], list[float]]
    init: Path | None = None
    resumes: bool = False

    @property
    def folders(self) -> list[Path]:
        """Where they are kept: in the folder of the run, and in that of the data if there is one."""
        config = self.setup.config
        return [
            Path(str(config.run_dir)) / "reference",
            *([] if config.data.cache_dir is None else [Path(config.data.cache_dir)]),
        ]

    @property
    def task_key(self) -> str:
        """What they depend on besides parameters and data."""
        chain = self.setup.chain
        assert isinstance(chain, TaskChain)
        return repr((chain.base.settings, getattr(chain.task, "ld_alpha", None), self.setup.config.precision.name))


def with_reference(reference: Reference, data: RunData) -> RunData:
    """The data with the log-probabilities of their answers: those that are kept for this model and these documents, or new ones.
    All ranks call this together. Raises CheckpointError if a run that goes on has lost them.
    """
    sets = {name: _with_logps(reference, batches) for name, batches in data.evaluation.items()}
    training = _with_logps(reference, data.training)
    return replace(data, training=training, evaluation=sets)


def _with_logps(reference: Reference, batches: Batches) -> DocumentBatches:
    if not isinstance(batches, DocumentBatches):
        raise DataError("cannot keep log-probabilities of a reference model: the data are read anew. Use task.reference=frozen.")
    key = hashlib.sha256(f"{batches.data_fingerprint} {reference.task_key}".encode()).hexdigest()[:24]
    name = f"{key}-{_parameters_key(reference)}.npy"
    pattern = f"{key}-*.npy" if reference.resumes else name
    found = _kept(reference.folders[:1], pattern, len(batches.documents)) if reference.resumes else None
    found = found if found is not None else _kept(reference.folders, name, len(batches.documents))
    if reference.agree([float(found is None)])[0]:
        if reference.resumes and reference.setup.config.init_from is not None:
            raise CheckpointError(
                f"cannot go on: {reference.folders[0] / name} is missing or damaged. It has the log-probabilities of the "
                "reference model.\nRestore it, or begin a new run with init_from= and another run_dir."
            )
        found = _computed(reference, batches)
    assert found is not None
    if reference.rank == 0:
        for folder in reference.folders:
            _keep(folder / name, found)
    return batches.with_reference_logps(found)


def _computed(reference: Reference, batches: DocumentBatches) -> NDArray[np.float32]:
    """(documents,): what the program gives, sequence by sequence."""
    program, setup, rank = reference.program, reference.setup, reference.rank
    assert isinstance(setup.chain, TaskChain)
    chain = AnswerLogps(setup.chain.base, setup.chain.task)
    small = batches.in_order(batches.shape.batch_size // num_microbatches(setup.config))
    state: State = first_state(replace(setup, chain=chain), program, rank, reference.device, reference.init)
    run = program.bind(device=reference.device, counter=reference.watch, timeout_s=setup.config.timeout_s)
    found = np.full(len(batches.documents), np.nan, np.float32)
    with LocalBatches(program, small, rank, reference.device) as local:
        for step in range(small.steps_per_epoch):
            batch = local.take(step, following=step + 1 if step + 1 < small.steps_per_epoch else None)
            state, results = run(state, batch)
            logps_BN = results["logps"].to("cpu", torch.float32).numpy()
            for row in range(small.shape.batch_size):
                documents = small.documents_in(step, row)
                found[documents] = logps_BN[row, : len(documents)]
    assert not np.isnan(found).any()
    return found


def _kept(folders: list[Path], pattern: str, count: int) -> NDArray[np.float32] | None:
    """What a file of that name has, if there is one for so many documents."""
    for path in (path for folder in folders for path in sorted(folder.glob(pattern))):
        try:
            values = np.load(path, allow_pickle=False)
        except (OSError, ValueError):
            continue
        if values.dtype == np.float32 and values.shape == (count,) and np.isfinite(values).all():
            return values
    return None


def _keep(path: Path, values: NDArray[np.float32]) -> None:
    if path.exists() and _kept([path.parent], path.name, len(values)) is not None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        np.save(file, values, allow_pickle=False)
    draft.replace(path)


def _parameters_key(reference: Reference) -> str:
    """A hash of where the parameters come from: of a folder the beginning and the size of each file, of fresh ones the seed."""
    config, init = reference.setup.config, reference.init
    folder = init if init is not None else None if config.model.random_init else config.model.path
    digest = hashlib.sha256()
    if folder is None:
        digest.update(f"seed {config.seed}".encode())
    else:
        for file in sorted(path for path in Path(folder).rglob("*") if path.suffix in (".safetensors", ".json", ".bin")):
            with file.open("rb") as opened:
                digest.update(f"{file.relative_to(folder)} {file.stat().st_size}".encode() + opened.read(_HEAD_BYTES))
    return digest.hexdigest()[:16]
