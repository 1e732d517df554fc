"""The code of every segment of a chain. Segments that are alike share a compilation, and so do slices of a segment that read
equally many past slices, except the last slice, which carries nothing over."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from mpar import tree
from mpar.chain import CONTEXT_OF_PAST, Carry, Chain, Segment, context_of, is_axes, of_past
from mpar.compiler.build._units import Unit
from mpar.compiler.segment import SegmentCode, SegmentSpecs, Slices, Target, TracedSegment, compile_segment, trace_segment
from mpar.errors import ConfigError
from mpar.precision import Precision
from mpar.spec import P
from mpar.strategy import Strategy
from mpar.tree import Tree

__all__ = ["SegmentCodes", "SegmentCompiler", "reach_in_slices"]


@dataclass(frozen=True)
class SegmentCodes:
    """The code of all segments of a chain.

    by_segment: for each segment, the code of every slice.
    entering:   for each segment, the leaves of the x that enters it, as local tensors without data, with their specs; in the last
                entry those of the x that leaves the chain.
    active:     for each segment and slice, which leaves of the x that enters it depend on a parameter that is trained; in the
                last entry those of the x that leaves the chain.
    reach:      for each segment, how many earlier slices one slice reads.
    leaving:    the paths of the leaves of the x that leaves the chain.
    """

    by_segment: list[Slices]
    entering: list[list[tuple[Tensor, P]]]
    active: list[list[tuple[int, ...]]]
    reach: list[int]
    leaving: list[str] = field(default_factory=list)

    def has_backward(self, segment: int) -> bool:
        """Whether a segment has a backward: a parameter of it is trained, or something that enters it depends on one."""
        return any(code.backward is not None for code in self.by_segment[segment])

    def returns_gradients(self, segments: range) -> bool:
        """Whether the stage with these segments gives gradients of what enters it."""
        return any(self.active[segments.start])


@dataclass(frozen=True)
class _Slice:
    """The function of a segment for a slice that reads `num_past` earlier slices.

    In the place of x it takes `(x, *past)`, where `past` is what each of these slices carried over. It returns `(x, carried)`;
    the last slice carries nothing over and returns `(x,)`.
    """

    carry: Carry
    num_past: int
    last: bool

    def __call__(self, params: tuple, x: Any, context: Any, *, training: bool) -> tuple:
        x, *past = x
        x, carried, *results = self.carry.fn(params, x, context, tuple(past), training=training)
        return (x,) if self.last else (x, carried), *results


@dataclass(frozen=True)
class _Stateful:
    """The function of a segment that keeps state: in the place of x it takes `(x, state)`, and returns this pair for later."""

    fn: Callable[..., tuple]

    def __call__(self, params: tuple, x: Any, context: Any, *, training: bool) -> tuple:
        x, state = x
        x, state, *results = self.fn(params, x, context, state, training=training)
        return (x, state), *results


@dataclass(frozen=True)
class _Entering:
    """What enters a segment: its x and the context, as trees of global tensors without data, and the specs of their leaves.

    active: which leaves of x depend on a parameter that is trained.
    """

    x: Any
    x_specs: list[P]
    context: Mapping[str, Tensor]
    context_specs: list[P]
    active: tuple[int, ...] = ()

    def of(self, segment: Segment) -> "_Entering":
        """The same with those entries of the context that `segment` reads."""
        specs = dict(zip(self.context, self.context_specs, strict=True))
        context, specs = context_of(segment.name, self.context), context_of(segment.name, specs)
        return replace(self, context=context, context_specs=list(specs.values()))


@dataclass
class SegmentCompiler:
    """Compiles the segments of a chain. Equal functions of values that look alike are compiled once.

    length: the number of positions in a slice.
    training, differentiable: see `CompileOptions`.
    done:   the code made so far, by all that it depends on.
    """

    model: Chain
    strategy: Strategy
    target: Target
    precision: Precision
    units: Mapping[str, Unit]
    num_slices: int
    length: int
    training: bool
    differentiable: bool
    done: dict[tuple, SegmentCode] = field(default_factory=dict)

    def compile_all(self, context: Mapping[str, Tensor], context_specs: Sequence[P]) -> SegmentCodes:
        """Compile every segment, first to last; `context` holds global tensors without data."""
        codes = SegmentCodes([], [[]], [[()] * self.num_slices], [])
        after = _Entering(None, [], context, list(context_specs))
        for segment in self.model.segments:
            slices: Slices
            entering = after.of(segment)
            active = codes.active[-1]
            reach = reach_in_slices(segment, self.length) if self.num_slices > 1 else 0
            if segment.state:
                code = self._compile_stateful(segment, entering)
                slices = (code,)
                x, _ = cast(tuple, tree.unflatten(code.traced.x_structure, code.traced.x_out))
            elif segment.carry is None or reach == 0:
                slices = tuple(self._compile(segment, replace(entering, active=of_slice)) for of_slice in active)
                code = slices[-1]
                x = tree.unflatten(code.traced.x_structure, code.traced.x_out) if code.traced.x_out else None
            else:
                slices = self._compile_slices(segment, segment.carry, reach, entering, active)
                code = slices[-1]  # the last slice carries nothing over: its x_out is the x of the next segment alone
                (x,) = cast(tuple, tree.unflatten(code.traced.x_structure, code.traced.x_out))
            num_leaves = len(code.traced.x_out) - code.traced.num_state
            specs = list(code.forward.out_specs[:num_leaves])
            after = replace(after, x=x, x_specs=specs)
            codes.by_segment.append(slices)
            codes.entering.append(list(zip(code.forward.out_values[:num_leaves], specs, strict=True)))
            codes.active.append([tuple(i for i in of_slice.traced.active_out if i < num_leaves) for of_slice in slices])
            codes.reach.append(reach)
        codes.leaving.extend(tree.paths(after.x))
        return codes

    def _compile_stateful(self, segment: Segment, entering: _Entering) -> SegmentCode:
        """Compile a segment that keeps state, whose old state enters it behind x."""
        state = tuple(tree.get(self.model.abstract_state, path) for path in segment.state)
        axes = tuple(tree.get(self.model.state_axes, path) for path in segment.state)
        stateful = replace(segment, fn=_Stateful(segment.fn), out_axes=(segment.out_axes, axes))
        specs = [self.strategy.compute_spec(names, self.target.mesh) for names in tree.leaves(axes, is_leaf=is_axes)]
        seen = replace(entering, x=(entering.x, state), x_specs=[*entering.x_specs, *specs])
        return self._compile(stateful, seen, state)

    def _compile_slices(
        self, segment: Segment, carry: Carry, reach: int, entering: _Entering, active: Sequence[tuple[int, ...]]
    ) -> tuple[SegmentCode, ...]:
        """Compile a segment for each slice; what a slice carries over enters the later slices within reach.

        active: for each slice, which leaves of the x that enters depend on a parameter that is trained.
        """
        slices: list[SegmentCode] = []
        specs = dict(zip(entering.context, entering.context_specs, strict=True))
        carried: Any = None
        carried_specs: list[P] = []
        carried_active: list[tuple[int, ...]] = []  # for each slice, which of the leaves that it carries over
        of_keys = [key for key in CONTEXT_OF_PAST if key in entering.context]
        for c in range(self.num_slices):
            num_past, last = min(c, reach), c + 1 == self.num_slices
            past_keys = {of_past(key, i): key for i in range(num_past) for key in of_keys}
            first_of_past = [len(entering.x_specs) + i * len(carried_specs) for i in range(num_past)]
            active_past = zip(first_of_past, carried_active[c - num_past :], strict=True)
            out_axes = (segment.out_axes,) if last else (segment.out_axes, carry.axes)
            sliced = replace(segment, fn=_Slice(carry, num_past, last), out_axes=out_axes)
            seen = _Entering(
                (entering.x, *[carried] * num_past),
                [*entering.x_specs, *carried_specs * num_past],
                {**entering.context, **{name: entering.context[key] for name, key in past_keys.items()}},
                [*entering.context_specs, *(specs[key] for key in past_keys.values())],
                (*active[c], *(first + i for first, of_slice in active_past for i in of_slice)),
            )
            code = self._compile(sliced, seen)
            if not last:
                y, carried = cast(tuple, tree.unflatten(code.traced.x_structure, code.traced.x_out))
                num_y, num_out = len(tree.leaves(y)), len(code.traced.x_out)
                carried_specs = list(code.forward.out_specs[num_y:num_out])
                carried_active.append(tuple(i - num_y for i in code.traced.active_out if num_y <= i < num_out))
            slices.append(code)
        return tuple(slices)

    def _compile(self, segment: Segment, entering: _Entering, state: Tree = ()) -> SegmentCode:
        """The code of a segment for what enters it; `state` is the last part of the x that enters."""
        read = [self.units[path] for path in segment.paths]
        params = [_in_use(self.model, unit) for unit in read]
        traced = trace_segment(
            segment,
            params,
            entering.x,
            entering.context,
            training=self.training,
            differentiable=self.differentiable,
            num_state=len(tree.leaves(state)),
            trained=_trained(read),
            active=entering.active,
        )
        last = segment.name == self.model.segments[-1].name
        _check_results(segment, traced, tree.leaves(state), last=last, differentiable=self.differentiable)
        specs = SegmentSpecs(
            params=tuple(spec for unit in read for spec in unit.compute),
            x=tuple(entering.x_specs),
            context=tuple(entering.context_specs),
            out=tuple(self._out_specs(segment)) if traced.x_out else (),
        )
        key = (id(traced), specs.params, specs.x, specs.out)
        if key not in self.done:
            self.done[key] = compile_segment(segment.name.split(".")[0], traced, specs, self.target)
        return self.done[key]

    def _out_specs(self, segment: Segment) -> list[P]:
        return [self.strategy.compute_spec(axes, self.target.mesh) for axes in tree.leaves(segment.out_axes, is_leaf=is_axes)]


def _check_results(segment: Segment, traced: TracedSegment, state: Sequence[Tensor], *, last: bool, differentiable: bool) -> None:
    """Raise ConfigError unless the leaves of x that a segment returns fit its `out_axes`, its new state is like the old one, its
    losses are scalars, and "loss" is among them if it is the last. What is not differentiable has no losses, but the last x."""
    axes = [] if segment.out_axes is None else tree.leaves(segment.out_axes, is_leaf=is_axes)
    x_out = traced.x_out
    problems = []
    if len(axes) != len(x_out):
        problems.append(f"it returns {len(x_out)} leaves of x, its out_axes {segment.out_axes!r} describe {len(axes)}")
    problems += [
        f"leaf {i} of the x that it returns {tuple(leaf.shape)} has {leaf.ndim} dims, its out_axes {names} are {len(names)}"
        for i, (leaf, names) in enumerate(zip(x_out, axes, strict=False))
        if leaf.ndim != len(names)
    ]
    kept = x_out[len(x_out) - len(state) :]
    problems += [
        f"leaf {i} of the state that it returns is {new.dtype} {tuple(new.shape)}, it was given {old.dtype} {tuple(old.shape)}"
        for i, (old, new) in enumerate(zip(state, kept, strict=True))
        if (new.shape, new.dtype) != (old.shape, old.dtype)
    ]
    if not differentiable and traced.losses:
        problems.append(f"it returns the losses {list(traced.losses)}: a program that keeps state or returns x computes none")
    if not differentiable and last and len(x_out) == len(state):
        problems.append("it is the last of the chain and returns no x, which is what this program would return")
    if differentiable and last and "loss" not in traced.losses:
        problems.append(f"it is the last of the chain and returns the losses {list(traced.losses)}, no 'loss'")
    values = [node.meta["val"] for node in traced.logical.results[len(x_out) : len(x_out) + len(traced.losses)]]
    problems += [
        f"its loss {name!r} has shape {tuple(value.shape)}, it must be a scalar"
        for name, value in zip(traced.losses, values, strict=True)
        if value.ndim
    ]
    if problems:
        raise ConfigError(f"cannot compile segment {segment.name!r}:\n  " + "\n  ".join(problems))


def reach_in_slices(segment: Segment, length: int) -> int:
    """How many earlier slices one slice of a segment reads, if slices have `length` positions."""
    if segment.carry is None:
        return 0
    reach = segment.carry.reach
    # the first position of a slice reads reach - 1 positions before it
    return sys.maxsize if reach is None else -(-(reach - 1) // length)


def _trained(units: Sequence[Unit]) -> list[int]:
    """Which parameters of these units are trained, as indices into those of all of them."""
    first = itertools.accumulate((len(unit.leaves) for unit in units), initial=0)
    return [start + i for start, unit in zip(first, units, strict=False) for i in unit.trained]


def _in_use(model: Chain, unit: Unit) -> Any:
    """The subtree of a unit's parameters as tensors without data, in the dtypes in which they are used."""
    structure = tree.flatten(tree.get(model.abstract_params, unit.path))[1]
    leaves = [leaf.new_empty(leaf.shape, dtype=dtype) for (_, leaf), dtype in zip(unit.leaves, unit.compute_dtypes, strict=True)]
    return tree.unflatten(structure, leaves)
