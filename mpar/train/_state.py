"""Makes the shards of a rank's state: fresh ones, from Hugging Face weights, or from a checkpoint of any mesh."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mpar import checkpoint, tree
from mpar.adapters import ADAPTERS, AdaptedModel, merged_leaf
from mpar.checkpoint import Json
from mpar.data import Batches, stream_report
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.models import DecoderParams, HfReader, Model, Read, Trainable, shard_slices
from mpar.program import Leaf, Program, State
from mpar.quantised import QuantisedReader, is_quantised_folder
from mpar.spec import local_shape
from mpar.tasks import BESIDE_MODEL
from mpar.train._adapters import adapted_part
from mpar.train._changes import model_then
from mpar.train._config import PlainConfig, ResumeConfig
from mpar.train._data_items import unlike_data
from mpar.train._health import Health, Seen
from mpar.train._quantised import dequantised, quantised_part

__all__ = [
    "PARAMS",
    "Progress",
    "check_adapters",
    "checkpoint_in",
    "fresh_state",
    "has_params",
    "is_checkpoint",
    "load_params",
    "load_state",
    "open_params",
    "read_params",
    "resume_from",
]

_MOST_LISTED = 8
PARAMS = "params."
"""What the names of parameters begin with in a checkpoint; the other tensors are the optimizer's."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and what decides what comes next.

    data:            the fingerprint of the batches. data_items: what they depend on; empty in older checkpoints.
    health:          what past steps say about the next one; it decides what a spike is.
    data_start:      the step after which the first batch of these data came; 0 unless other data took the place of older ones.
    optimizer_start: the step after which the optimizer's state was zero; 0 unless a run went on from parameters only.
    hf_config:       the content of config.json of the model, which its folder may lose; None in older checkpoints.
    data_use:        by the name of each source, the rows and tokens that all steps have been given; empty in older checkpoints.
    data_cursor:     where to begin reading a stream for the next step; empty if any batch of the data can be read at once.
    """

    step: int = 0
    tokens: int = 0
    data: str = ""
    seed: int = 0
    health: Health = field(default_factory=Health)
    data_items: Mapping[str, Json] = field(default_factory=dict)
    data_start: int = 0
    optimizer_start: int = 0
    hf_config: Mapping[str, Json] | None = None
    data_use: Mapping[str, Json] = field(default_factory=dict)
    data_cursor: Mapping[str, Json] = field(default_factory=dict)

    def as_extras(self, config: PlainConfig) -> dict[str, Json]:
        """What a checkpoint records besides tensors."""
        return {**vars(self), "health": self.health.as_plain(), "config": config}

    def after(self, seen: Seen, window: int) -> "Progress":
        """The progress after one more step, whose tokens count if its update was made; `window`: see `Health.after`."""
        tokens = self.tokens + (0 if seen.skipped else round(seen.weight))
        return replace(self, step=seen.step, tokens=tokens, health=self.health.after(seen, window))

    def having_read(self, batches: Batches) -> "Progress":
        """The progress with what the step before this one was given, and where the next one begins to read."""
        position = self.step - self.data_start
        use: dict[str, Json] = dict(self.data_use)
        for name, counts in batches.use(position - 1).items():
            before = use.get(name, [0, 0])
            assert isinstance(before, list)
            use[name] = [int(str(old)) + new for old, new in zip(before, counts, strict=True)]
        return replace(self, data_use=use, data_cursor=cast(Mapping[str, Json], batches.cursor(position)))

    def data_numbers(self) -> dict[str, float]:
        """The rows and tokens of each source that all steps have been given. Of a stream also, by reason, the rows that were left
        out before the block in which the next step begins."""
        numbers: dict[str, float] = {}
        for name, counts in self.data_use.items():
            assert isinstance(counts, list)
            numbers[f"rows/{name}"], numbers[f"tokens/{name}"] = (int(str(count)) for count in counts)
        unused = stream_report(self.data_cursor).unused if self.data_cursor else {}
        return numbers | {f"left_out/{reason}": count for reason, count in unused.items()}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Json], path: Path) -> "Progress":
        """What the checkpoint at `path` records besides tensors. Raises CheckpointError if an entry is missing or wrong."""
        later = {"data_items": {}, "data_start": 0, "optimizer_start": 0, "hf_config": None, "health": None}
        later |= {"data_use": {}, "data_cursor": {}}
        match {**later, **extras}:
            case {
                "step": int(step),
                "tokens": int(tokens),
                "data": str(data),
                "seed": int(seed),
                "health": health,
                "data_items": dict(items),
                "data_start": int(data_start),
                "optimizer_start": int(optimizer_start),
                "hf_config": (dict() | None) as hf_config,
                "data_use": dict(use),
                "data_cursor": dict(cursor),
            }:
                with suppress(ValueError, TypeError):
                    past = Health() if health is None else Health.from_plain(health)
                    return cls(step, tokens, data, seed, past, items, data_start, optimizer_start, hf_config, use, cursor)
        raise CheckpointError(
            f"{path}: its state.json lacks step, tokens, data, seed or health of a run; its entries are {sorted(extras)}.\n"
            "Use a checkpoint that mpar train wrote."
        )

    def go_on(self, path: Path, resume: ResumeConfig, data: str, items: Mapping[str, Json]) -> "Progress":
        """The progress of a run that goes on from the checkpoint at `path`, with `data`, the fingerprint of the present batches.

        Raises CheckpointError, which says in which of the `items` they differ, if they are unlike those of the checkpoint and
        `resume.data` is not restart.
        """
        reached = self
        if self.data != data:
            if resume.data != "restart":
                raise unlike_data(path, self.data_items, items)
            reached = replace(self, data=data, data_items=items, data_start=self.step, data_cursor={})
        return reached if resume.state == "all" else replace(reached, optimizer_start=self.step, health=Health())


def fresh_state(
    program: Program,
    model: Trainable,
    rank: int,
    *,
    seed: int,
    source: str | None,
    device: torch.device,
    teacher: str | None = None,
) -> State:
    """This rank's shards before the first step; the optimizer's state is zero. Parameters are drawn from `seed`; those of the
    model that others are made of, without adapters, are read from `source` if it is given, a Hugging Face folder or a checkpoint.
    A checkpoint may also have those of adapters and of the task; adapters that the model lacks are added to the weights. A
    reference model begins as the model does, a teacher as the Hugging Face folder `teacher` says.
    """
    leaves: dict[str, Tensor] = {}
    saved = Path(source) if source is not None and is_checkpoint(Path(source)) else None
    present = set() if saved is None else set(checkpoint.names(saved))
    paths = {prefix: set(tree.paths(part.abstract_params)) for prefix, part in model.parts.items()}
    complete = {prefix: {PARAMS + path for path in of_part} <= present for prefix, of_part in paths.items()}
    with ExitStack() as sources:
        read = sources.enter_context(_source(model, seed, source, check=not all(complete.values())))
        readers = dict.fromkeys(paths, read)
        if teacher is not None:
            readers |= {
                prefix: sources.enter_context(_source(model.parts[prefix], seed, teacher, check=True))
                for prefix in paths
                if prefix
            }
        for leaf in program.part(rank).state_in:
            kind, _, path = leaf.path.partition(".")
            if kind != "params":
                leaves[leaf.path] = _zeros(leaf, program.mesh, device)
                continue
            cut = shard_slices(leaf.shape, leaf.spec, program.mesh, rank)
            prefix = next((beginning for beginning in paths if beginning and path.startswith(beginning)), "")
            inner, read = path.removeprefix(prefix), readers[prefix]
            is_teacher = teacher is not None and prefix != ""
            if not is_teacher and PARAMS + inner in present and (complete[prefix] or inner not in paths[prefix]):
                part = read(inner, cut)
            elif inner in paths[prefix]:
                part = model.parts[prefix].first_leaf(seed, inner, cut, read)
            else:
                part = model.init_leaf(seed, path, cut)
            leaves[leaf.path] = part.to(device=device, dtype=leaf.dtype).contiguous()
    return State(leaves)


@contextmanager
def _source(model: Trainable, seed: int, source: str | None, *, check: bool) -> Iterator[Read]:
    """What gives the leaves of the model without adapters. check: whether a checkpoint must have these and no others."""
    plain, made = model.plain, quantised_part(model.parts[""])
    if source is None:
        yield lambda path, slices: plain.init_leaf(seed, path, slices)
    elif is_checkpoint(Path(source)):
        with checkpoint.Reader(source) as saved:
            left_out = _left_out(model, saved.tensors)
            then = _adapted_then(model, saved.path) if left_out else None
            if then is None and (check or left_out):
                _check_params(plain, saved)
            read = _whole_leaves(then, saved)
            yield lambda path, slices: _part(read(path), slices)
    elif made is not None and is_quantised_folder(source):
        with QuantisedReader(made, source) as parts:
            yield parts
    else:
        with HfReader(_exportable(plain, source), source) as folder:
            yield folder.read_leaf


def _whole_leaves(then: Trainable | None, saved: checkpoint.Reader) -> Callable[[str], Tensor]:
    """What gives the leaves of a checkpoint, or if it is of the model `then`, those of the model without adapters, to which
    these are added."""

    def read(path: str) -> Tensor:
        return saved.read(PARAMS + path)

    adapted = None if then is None else adapted_part(then)
    if then is None or adapted is None:
        return read
    return partial(merged_leaf, adapted, read=dequantised(then, read))


def _left_out(model: Trainable, names: Iterable[str]) -> set[str]:
    """The parameters of adapters among the `names` of a checkpoint that `model` has not."""
    known = {PARAMS + name for name in tree.paths(model.abstract_params)}
    return {name for name in names if name.startswith(f"{PARAMS}{ADAPTERS}.")} - known


def _adapted_then(model: Trainable, path: Path) -> Trainable | None:
    """The model with adapters that the checkpoint at `path` is of, if `model` can begin from their sum: it has the parameters
    without adapters, none of them quantised. None if it has others."""
    extras = checkpoint.read_extras(path)
    config = extras.get("config")
    then = model_then(config, Progress.from_extras(extras, path).hf_config) if isinstance(config, Mapping) else None
    now = model.parts[""]
    if then is None or isinstance(now, AdaptedModel) or quantised_part(now) is not None:
        return None
    return then if _shapes(then.plain) == _shapes(model.plain) else None


def check_adapters(model: Trainable, path: Path) -> None:
    """Raise CheckpointError, with the matrices, if a run of `model` cannot begin with the parameters in the checkpoint at `path`
    because these are with adapters that it has not, and to which it cannot add them: no such weights were trained."""
    left_out, now = _left_out(model, checkpoint.names(path)), model.parts[""]
    if not left_out or (adapted_part(now) is None and quantised_part(now) is None):
        return
    has = "quantised weights, to which they cannot be added" if adapted_part(now) is None else "an adapter of other matrices"
    names = sorted({name.removeprefix(PARAMS).rpartition(".")[0] for name in left_out})
    lines = [*names[:_MOST_LISTED], *([f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else [])]
    raise CheckpointError(
        f"cannot begin with the parameters in {path}: it has adapters that this run would leave out, which has {has}:\n  "
        + "\n  ".join(lines)
        + "\nUse the adapter of that run: its config.yaml has the group `adapter`. Or begin with the sum of its weights and "
        "adapters, to which this run adds its own: init_from= the folder hf that it has exported."
    )


def _shapes(model: Trainable) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in tree.leaves_with_path(model.abstract_params)}


def _part(x: Tensor, slices: Sequence[slice] | None) -> Tensor:
    return x if slices is None else x[tuple(slices)]


def has_params(model: Trainable, path: Path) -> bool:
    """Whether the checkpoint at `path` has parameters under all names of the model, those of its adapters as well, and no
    adapters besides."""
    names = set(checkpoint.names(path))
    return {PARAMS + name for name in tree.paths(model.abstract_params)} <= names and not _left_out(model, names)


def _exportable(model: Trainable, folder: str) -> Model:
    if isinstance(model, Model):
        return model
    raise CheckpointError(
        f"cannot start from the weights in {folder}: {model.name} does not say how its parameters are called in such folders.\n"
        "Give init_from= a run or a checkpoint, or leave it out."
    )


def _idle_slots(program: Program, names: Iterable[str]) -> set[str]:
    """Those of `names` that are slots of a parameter whose metric changes it, such as the bias of a router: the optimizer has
    none for it. Checkpoints of versions in which it had some still have them, and nothing has ever changed them."""
    kept = {leaf.path for leaf in program.state_in}
    of_optimizer = {tuple(path.split(".", 2)[:2]) for path in kept if not path.startswith(PARAMS)}
    idle = set()
    for name in set(names) - kept:
        *slot, path = name.split(".", 2)
        if tuple(slot) in of_optimizer and PARAMS + path in kept and path not in program.facts.frozen:
            idle.add(name)
    return idle


def load_state(
    program: Program, path: Path, rank: int, device: torch.device, *, params_only: bool = False
) -> tuple[State, Progress]:
    """This rank's shards and the progress of the run, from the checkpoint at `path`, which any mesh may have saved.

    params_only: the optimizer's state is zero, whatever the checkpoint has of it. Parameters are then cast to the dtypes in which
        the program stores them; frozen ones, which are stored in the dtype in which they compute, are always cast.
    """
    leaves_in = [leaf for leaf in program.part(rank).state_in if not params_only or leaf.path.startswith(PARAMS)]
    frozen = {PARAMS + name for name in program.facts.frozen}
    saved = _saved_dtypes(path) if params_only or frozen else {}
    read_as = {leaf.path: leaf.dtype for leaf in leaves_in}
    for leaf in leaves_in:
        if leaf.path in saved and (params_only or leaf.path in frozen):
            read_as[leaf.path] = _readable_as(leaf.dtype, saved[leaf.path])
    wanted = {leaf.path: (leaf.shape, leaf.spec, read_as[leaf.path]) for leaf in leaves_in}
    others = {name for name in checkpoint.names(path) if not name.startswith(PARAMS)}
    if not others and any(not name.startswith(PARAMS) for name in wanted):
        raise CheckpointError(
            f"cannot go on from {path}: it has parameters only, since it was saved with checkpoint.optimizer_state=false.\n"
            "To go on with a fresh optimizer: resume=weights. To begin a new run with them: init_from= and a new run_dir."
        )
    idle = _idle_slots(program, others)
    if params_only:
        others |= {name for name in checkpoint.names(path) if name.removeprefix(PARAMS).startswith(BESIDE_MODEL)} - wanted.keys()
    elsewhere = {leaf.path for leaf in program.state_in} - wanted.keys() | (others if params_only else idle)
    loaded = checkpoint.load(path, wanted, program.mesh, rank, elsewhere=elsewhere)
    progress = Progress.from_extras(checkpoint.read_extras(path), path)
    leaves = {
        leaf.path: loaded[leaf.path].to(device, leaf.dtype) if leaf.path in loaded else _zeros(leaf, program.mesh, device)
        for leaf in program.part(rank).state_in
    }
    if params_only:
        return State(leaves), progress
    return State(leaves, progress.step - progress.optimizer_start, progress.health.skipped), progress


def _saved_dtypes(path: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor in a checkpoint."""
    with checkpoint.Reader(path) as reader:
        return {name: x.dtype for name, x in reader.tensors.items()}


def _readable_as(wanted: torch.dtype, saved: torch.dtype) -> torch.dtype:
    """The dtype in which to read a parameter: that in which it is saved, if it can be cast to the one that is wanted."""
    return saved if saved.is_floating_point and wanted.is_floating_point else wanted


def _zeros(leaf: Leaf, mesh: Mesh, device: torch.device) -> Tensor:
    return torch.zeros(local_shape(leaf.shape, leaf.spec, mesh), dtype=leaf.dtype, device=device)


def load_params(model: Trainable, path: Path) -> DecoderParams[Tensor]:
    """The global parameters in a checkpoint. Raises CheckpointError unless they are exactly those of the model."""
    like = model.abstract_params
    loaded = dict(read_params(model, path))
    leaves = [loaded[name] for name in tree.paths(like)]
    return cast(DecoderParams[Tensor], tree.unflatten(tree.flatten(like)[1], leaves))


def read_params(model: Trainable, path: Path) -> Iterator[tuple[str, Tensor]]:
    """The global parameters in a checkpoint with their paths, one after the other, in the dtypes of the model.

    Those of a task are left out. Raises CheckpointError, before the first, unless they are exactly those of the model, and if one
    that is read is damaged.
    """
    with open_params(model, path) as read:
        for name in tree.paths(model.abstract_params):
            yield name, read(name)


@contextmanager
def open_params(model: Trainable, path: Path) -> Iterator[Callable[[str], Tensor]]:
    """What gives the global parameters in a checkpoint by path. Raises CheckpointError unless they are those of the model."""
    with checkpoint.Reader(path) as reader:
        _check_params(model, reader)
        dtypes = {name: leaf.dtype for name, leaf in tree.leaves_with_path(model.abstract_params)}
        yield lambda name: reader.read(PARAMS + name).to(dtypes[name])


def _check_params(model: Trainable, reader: checkpoint.Reader) -> None:
    leaves = tree.leaves_with_path(model.abstract_params)
    expected = {PARAMS + name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves}
    beside = tuple(PARAMS + beginning for beginning in BESIDE_MODEL)
    found = {
        name: (x.shape, x.dtype) for name, x in reader.tensors.items() if name.startswith(PARAMS) and not name.startswith(beside)
    }
    problems = [f"missing: {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected: {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"different: {name} is {found[name]}, the model's is {wanted}"
        for name, wanted in expected.items()
        if name in found and found[name] != (wanted[0], _readable_as(wanted[1], found[name][1]))
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise CheckpointError(f"the parameters in {reader.path} are not those of this {model.name} model:\n  {lines}")


def resume_from(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to go on from, or None for a fresh start. Raises CheckpointError.

    resume: auto (the newest checkpoint in `run_dir`, if any), never (`run_dir` must have none), or the folder of a checkpoint or
    of a run. `run_dir` must have no checkpoint of a later step than the one in that folder, because steps are written only once.
    """
    folder = run_dir / "checkpoints"
    if resume in ("auto", "never"):
        newest = checkpoint.latest(folder)
        if newest is not None and resume == "never":
            raise CheckpointError(
                f"cannot start afresh in {run_dir}: it holds {newest.name} of another run, and resume=never.\n"
                "Choose another run_dir, delete this one, or go on with resume=auto."
            )
        return newest
    path = checkpoint_in(Path(resume))
    if path is None:
        raise CheckpointError(
            f"cannot go on from {resume}: it is neither the folder of a checkpoint nor the run_dir of a run that has one.\n"
            "To begin with the weights of a Hugging Face folder, give it as init_from."
        )
    step = Progress.from_extras(checkpoint.read_extras(path), path).step
    later = [other.name for other in checkpoint.named(folder) if int(other.name.removeprefix("step_")) > step]
    if later:
        raise CheckpointError(
            f"cannot go on from {path} in {run_dir}: that folder holds {', '.join(later)}, which would be written again.\n"
            "Choose another run_dir, move these checkpoints away, or leave resume out to go on from the newest."
        )
    return path


def checkpoint_in(folder: Path) -> Path | None:
    """`folder` itself if it is a checkpoint, the newest checkpoint if it is the run_dir of a run; else None."""
    newest = checkpoint.latest(folder / "checkpoints")
    return folder if newest is None and is_checkpoint(folder) else newest


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is that of one checkpoint, sound or not."""
    return (folder / "index.json").is_file()
