"""Makes the shards of a rank's state: fresh ones, from Hugging Face weights, or from a checkpoint of any mesh; and saves them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpar import checkpoint, tree
from mpar.checkpoint import Json
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.models import DecoderParams, HfReader, Model, shard_slices
from mpar.program import Program, State
from mpar.spec import P, local_shape
from mpar.train._config import PlainConfig

__all__ = ["Progress", "check_data", "fresh_state", "load_params", "load_state", "resume_from", "save_state"]


@dataclass(frozen=True)
class Progress:
    """How far a run has come: step and tokens, and the fingerprint of its data and the seed, which decide what comes next."""

    step: int = 0
    tokens: int = 0
    data: str = ""
    seed: int = 0

    def as_extras(self, config: PlainConfig) -> PlainConfig:
        """What a checkpoint records besides tensors."""
        return {"step": self.step, "tokens": self.tokens, "data": self.data, "seed": self.seed, "config": config}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Json], path: Path) -> "Progress":
        """What the checkpoint at `path` records besides tensors. Raises CheckpointError if an entry is missing or wrong."""
        match extras:
            case {"step": int(step), "tokens": int(tokens), "data": str(data), "seed": int(seed)}:
                return cls(step, tokens, data, seed)
        raise CheckpointError(
            f"{path}: its state.json lacks step, tokens, data or seed of a run; its entries are {sorted(extras)}.\n"
            "Use a checkpoint that mpar train wrote."
        )


def fresh_state(program: Program, model: Model, rank: int, *, seed: int, hf_path: str | None, device: torch.device) -> State:
    """This rank's shards before the first step. Parameters are drawn from `seed`, or read from the weights in `hf_path`; the
    optimizer's state is zero.
    """
    leaves: dict[str, Tensor] = {}
    reader = None if hf_path is None else HfReader(model, hf_path)
    for leaf in program.part(rank).state_in:
        kind, _, path = leaf.path.partition(".")
        if kind != "params":
            leaves[leaf.path] = torch.zeros(local_shape(leaf.shape, leaf.spec, program.mesh), dtype=leaf.dtype, device=device)
            continue
        cut = shard_slices(leaf.shape, leaf.spec, program.mesh, rank)
        part = model.init_leaf(seed, path, cut) if reader is None else reader.read_leaf(path, cut)
        leaves[leaf.path] = part.to(device=device, dtype=leaf.dtype).contiguous()
    return State(leaves)


def load_state(program: Program, path: Path, rank: int, device: torch.device) -> tuple[State, Progress]:
    """This rank's shards and the progress of the run, from the checkpoint at `path`, which any mesh may have saved."""
    wanted = {leaf.path: (leaf.shape, leaf.spec, leaf.dtype) for leaf in program.part(rank).state_in}
    elsewhere = {leaf.path for leaf in program.state_in} - wanted.keys()
    leaves = checkpoint.load(path, wanted, program.mesh, rank, elsewhere=elsewhere)
    progress = Progress.from_extras(checkpoint.read_extras(path), path)
    return State({name: leaf.to(device) for name, leaf in leaves.items()}, progress.step), progress


def load_params(model: Model, path: Path) -> DecoderParams[Tensor]:
    """The global parameters in a checkpoint, for export. Raises CheckpointError unless they are exactly those of the model."""
    like = model.abstract_params
    wanted = {f"params.{name}": (tuple(leaf.shape), P(), leaf.dtype) for name, leaf in tree.leaves_with_path(like)}
    others = [name for name in checkpoint.names(path) if not name.startswith("params.")]
    loaded = checkpoint.load(path, wanted, Mesh(), 0, elsewhere=others)
    return tree.unflatten(tree.flatten(like)[1], [loaded[name] for name in wanted])


def save_state(
    folder: Path,
    program: Program,
    state: State,
    reached: Progress,
    config: PlainConfig,
    rank: int,
    barrier: Callable[[], None],
    keep: int | None,
) -> Path:
    """Write a checkpoint, all ranks together; returns its path. Of positions along pp with the same leaf, the first writes it."""
    position = program.position(rank)
    earlier = {leaf.path for part in program.parts[:position] for leaf in part.state_out}
    leaves_to_write = {leaf.path: leaf for leaf in program.parts[position].state_out if leaf.path not in earlier}
    return checkpoint.save(
        folder,
        reached.step,
        {path: state.leaves[path] for path in leaves_to_write},
        {path: leaf.spec for path, leaf in leaves_to_write.items()},
        program.mesh,
        rank,
        {path: leaf.shape for path, leaf in leaves_to_write.items()},
        reached.as_extras(config),
        barrier,
        keep=keep,
    )


def resume_from(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to go on from, or None for a fresh start. Raises CheckpointError.

    resume: auto (the newest checkpoint in `run_dir`, if any), never (`run_dir` must have none), or a checkpoint's folder.
    """
    folder = run_dir / "checkpoints"
    newest = checkpoint.latest(folder)
    if resume == "auto":
        return newest
    if resume == "never":
        if newest is not None:
            raise CheckpointError(
                f"cannot start afresh in {run_dir}: it holds {newest.name} of another run, and resume=never.\n"
                "Choose another run_dir, delete this one, or go on with resume=auto."
            )
        return None
    path = Path(resume)
    checkpoint.read_extras(path)
    return path


def check_data(path: Path, then: str, now: str) -> None:
    """Raise CheckpointError unless the fingerprints of the data agree: `then` of the checkpoint at `path`, `now` of this run."""
    if then != now:
        raise CheckpointError(
            f"cannot go on from {path}: its run was trained on other data, or with another batch size, sequence length or seed, "
            "so its next step would be another one.\n"
            "Restore these settings (config.yaml in the run_dir has them), or choose a new run_dir."
        )
