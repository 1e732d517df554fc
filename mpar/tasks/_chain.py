"""TaskChain: a model as a chain that ends with the loss of a task in place of that of the next token."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import HIGHEST, Axes, Segment, is_axes
from mpar.errors import ConfigError
from mpar.models import HiddenHead, LanguageHead, Trainable, WrappedModel
from mpar.tasks._reference import REFERENCE, as_many, beside, for_reference, joined_paths, of_reference_alone
from mpar.tasks._task import Forward, Forwards, Task
from mpar.tree import Tree

__all__ = ["BESIDE_MODEL", "MEAN", "Measured", "TaskChain", "task_means"]

MEAN = ".mean"
"""How the names of those metrics of a segment end that are a sum and a count, of shape (2,)."""
TASK = "task"
"""Where the parameters of a task are in the tree."""
BESIDE_MODEL = (f"{TASK}.", f"{REFERENCE}.")
"""How the paths of parameters begin that are not those of the model."""


@dataclass(frozen=True)
class _TaskHead:
    """The function of the last segment: the heads of one or two models, then the loss of the task."""

    task: Task
    policy: LanguageHead
    policy_reads: tuple[int, ...]
    reference: LanguageHead | None = None
    reference_reads: tuple[int, ...] = ()

    def forwards(self, params: tuple, x: Tensor | tuple[Tensor, Tensor], context: Mapping[str, Tensor]) -> Forwards:
        """What the task is given."""
        policy_x, reference_x = x if isinstance(x, tuple) else (x, None)
        policy = Forward(self.policy, tuple(params[i] for i in self.policy_reads), policy_x, context)
        reference = None
        if self.reference is not None and reference_x is not None:
            of_reference = of_reference_alone(context)
            reference = Forward(self.reference, tuple(params[i] for i in self.reference_reads), reference_x, of_reference)
        return Forwards(policy, reference, context, params[-1] if self.task.parameters else {})

    def __call__(
        self, params: tuple, x: Tensor | tuple[Tensor, Tensor], context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[None, dict[str, Tensor], dict[str, Tensor]]:
        loss, means = self.task.loss(self.forwards(params, x, context))
        found = {}
        for name, parts in means.items():
            ending = HIGHEST if len(parts) == 1 else MEAN
            found[f"{name}{ending}"] = torch.stack([part.to(loss.dtype) for part in parts]).detach()
        return None, {"loss": loss}, found


@dataclass(frozen=True)
class _MeasuringHead(_TaskHead):
    """The same, with what the task measures in the place of its loss."""

    def __call__(  # type: ignore[override]
        self, params: tuple, x: Tensor | tuple[Tensor, Tensor], context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return dict(self.task.measure(self.forwards(params, x, context))), {}


def task_means(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics of a task among those of a step: means, NaN where nothing was counted, and highest values."""
    found = {}
    for name, value in metrics.items():
        if name.endswith((MEAN, HIGHEST)):
            total, *count = value.tolist()
            kept = name.removesuffix(MEAN).removesuffix(HIGHEST).partition(".")[2]
            found[kept] = (total / count[0] if count[0] else float("nan")) if count else total
    return found


@dataclass(frozen=True)
class TaskChain(WrappedModel):
    """`base`, trained by the loss of `task`.

    reference: a model to compare with, whose segments run beside those of `base`. Its parameters are frozen, and stored under
        `reference.`, unless `shared`: then it is the model itself without its adapters, and reads the same parameters.
    Raises ConfigError, with all problems, if the task and the models do not fit each other.
    """

    base: Trainable
    task: Task
    reference: Trainable | None = None
    shared: bool = False
    make_head: ClassVar[type[_TaskHead]] = _TaskHead

    def __post_init__(self) -> None:
        problems = []
        wanted = HiddenHead if self.task.reads_hidden else LanguageHead
        for model in (self.base, *([] if self.reference is None else [self.reference])):
            if not isinstance(model.segments[-1].fn, wanted):
                given = "features" if self.task.reads_hidden else "losses of single tokens"
                problems.append(
                    f"the last segment of this {model.name} model does not give {given} (mpar.models.{wanted.__name__})"
                )
        if self.reference is not None and self.reference.vocab_size != self.base.vocab_size:
            problems.append(
                f"the other model has a vocabulary of {self.reference.vocab_size} tokens, this one of {self.base.vocab_size}"
            )
        if self.reference is not None and self.shared:
            trained = sorted(set(tree.paths(self.reference.abstract_params)) - self.base.frozen)
            if trained:
                problems.append(
                    f"the reference model is this one without adapters, and {', '.join(trained[:4])} is trained in full"
                )
        if self.base.next_keys:
            problems.append("the model predicts several tokens: leave that out with model.mtp_loss_weight=null")
        taken = sorted(set(self.task.entries) & set(self.base.batch_axes))
        if taken:
            problems.append(f"the model reads batch keys that are the task's own: {', '.join(taken)}")
        if problems:
            raise ConfigError(f"cannot make a chain for {type(self.task).__name__}:\n  " + "\n  ".join(problems))

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Those of the model, side by side with those of the reference model, and the loss of the task."""
        *body, last = self.base.segments
        extra = (TASK,) if self.task.parameters else ()
        out_axes = dict(self.task.measured) if self.make_head is _MeasuringHead else None
        if self.reference is None:
            fn = self.make_head(self.task, last.fn, tuple(range(len(last.paths))))  # type: ignore[arg-type]  # checked when made
            paths = (*last.paths, *extra)
            return (*(Segment(s.name, s.fn, s.paths, s.out_axes) for s in body), Segment(last.name, fn, paths, out_axes))
        *others, other_last = self.reference.segments
        prefix = "" if self.shared else REFERENCE
        paths, *reads = joined_paths(last, other_last, prefix)
        fn = self.make_head(self.task, last.fn, reads[0], other_last.fn, reads[1])  # type: ignore[arg-type]  # checked when made
        others = others if len(others) == len(body) else as_many(others, len(body))
        pairs = (beside(policy, reference, prefix) for policy, reference in zip(body, others, strict=True))
        return (*pairs, Segment(last.name, fn, (*paths, *extra), out_axes))

    @functools.cached_property
    def abstract_params(self) -> Tree:
        """The parameters of the model, those of the task under `task.`, and those of the reference model under `reference.`."""
        own = {
            name: torch.empty([self._width if axis == "embed" else 1 for axis in axes], dtype=self._dtype, device="meta")
            for name, axes in self.task.parameters.items()
        }
        return self._joined(self.base.abstract_params, own, lambda model: model.abstract_params)

    @functools.cached_property
    def param_axes(self) -> Tree:
        """The logical axes of the parameters."""
        return self._joined(self.base.param_axes, dict(self.task.parameters), lambda model: model.param_axes)

    def _joined(self, base: Tree, own: Tree, of_model: Callable[[Trainable], Tree]) -> Tree:
        copied = self.copied
        if not own and copied is None:
            return base
        others = {} if copied is None else {REFERENCE: of_model(copied)}
        return {**tree.children(base), **({TASK: own} if own else {}), **others}

    @property
    def _width(self) -> int:
        """The width of the model: the size of a dim that is called `embed`."""
        axes = dict(tree.leaves_with_path(self.base.param_axes, is_leaf=is_axes))
        leaves = tree.leaves_with_path(self.base.abstract_params)
        return next(leaf.shape[axes[path].index("embed")] for path, leaf in leaves if "embed" in axes[path])

    @property
    def _dtype(self) -> torch.dtype:
        return next(leaf.dtype for leaf in tree.leaves(self.base.abstract_params) if leaf.is_floating_point())

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of losses: float32, or wider if a parameter is."""
        floats = [leaf.dtype for leaf in tree.leaves(self.base.abstract_params) if leaf.is_floating_point()]
        return functools.reduce(torch.promote_types, floats, torch.float32)

    @property
    def frozen(self) -> frozenset[str]:
        """Those of the model, all of the reference model, and the output matrix if the task reads no logits."""
        idle: set[str] = set()
        if not self.task.reads_logits:
            last = self.base.segments[-1]
            idle = {f"{last.paths[0]}.{name}" for name in last.fn.only_logits}  # type: ignore[attr-defined]
            idle &= set(tree.paths(self.base.abstract_params))
        copied = () if self.copied is None else tree.paths(self.copied.abstract_params)
        return self.base.frozen | idle | {f"{REFERENCE}.{path}" for path in copied}

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The keys of the model, and those of the task."""
        own = {key: entry.axes for key, entry in self.task.entries.items()}
        return {**self.base.batch_axes, **own}

    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> Mapping[str, Tensor]:
        """What the model makes of its part of the batch, and the entries of the task as they are."""
        own = {key: batch[key] for key in self.task.entries if key in batch}
        of_model = {key: x for key, x in batch.items() if key not in own}
        context = {**self.base.context(of_model, row_length), **own}
        if self.reference is not None and self.reference.settings != self.base.settings and not self.shared:
            context |= for_reference(context, self.reference.context(of_model, row_length))
        if "weight" in context:  # by which side losses are multiplied, because they are divided by the weight of the chain
            context["weight"] = self.weight(batch)
        return context

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """How much there is to learn from, as the task says."""
        return self.task.weight(batch).to(self._wide)

    @property
    def forbids_slices(self) -> str | None:
        """Rows stay whole, because the loss of an answer is a function of all its tokens."""
        return f"{type(self.task).__name__} compares answers, which are not cut."

    @property
    def stands_for(self) -> Mapping[str, int]:
        """Those of the model, and of the reference model if it has parameters of its own."""
        copied = {} if self.copied is None else self.copied.stands_for
        return {**self.base.stands_for, **{f"{REFERENCE}.{path}": count for path, count in copied.items()}}

    @property
    def beside(self) -> Trainable | None:
        """The reference model."""
        return self.reference

    @property
    def copied(self) -> Trainable | None:
        """The reference model, if it has parameters of its own."""
        return None if self.shared else self.reference

    @property
    def parts(self) -> Mapping[str, Trainable]:
        """The model, and the copy of the reference model, which begins as the model does."""
        return {"": self.base, **({} if self.copied is None else {f"{REFERENCE}.": self.copied})}

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The reference model begins as the same model; parameters of the task are zero."""
        top, _, inner = path.partition(".")
        if top == REFERENCE and self.copied is not None:
            return self.copied.init_leaf(seed, inner, slices)
        if top == TASK and self.task.parameters:
            leaf = tree.get(self.abstract_params, path)
            bounds = zip(leaf.shape, slices or [slice(None)] * leaf.ndim, strict=True)
            return torch.zeros([len(range(size)[cut]) for size, cut in bounds], dtype=leaf.dtype)
        return self.base.init_leaf(seed, path, slices)


@dataclass(frozen=True)
class Measured(TaskChain):
    """The same chain for `compile_forward`, which ends with what the task measures: `Task.measured` are its results."""

    make_head: ClassVar[type[_TaskHead]] = _MeasuringHead

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The keys of the model: what is measured depends on tokens and labels alone."""
        return self.base.batch_axes

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """That of the model."""
        return self.base.weight(batch)
