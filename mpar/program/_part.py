"""Part: the instructions of the ranks at one position along pp, written action by action."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Chain
from mpar.mesh import Mesh
from mpar.precision import Precision
from mpar.program._exchange import SharedUses, exchange_gradients
from mpar.program._gathers import Gathers, Gradients, Use, use_name
from mpar.program._passes import advance_sends, hoist_gathers, insert_frees
from mpar.program._program import Leaf, Part
from mpar.program._report import widest, write_losses, write_metrics
from mpar.program._segments import Code, SegmentCode
from mpar.program._split import split_segment
from mpar.program._stages import Pipeline
from mpar.program._units import Unit, group_units
from mpar.program._update import write_norm, write_updates
from mpar.program._writer import Writer
from mpar.schedules import Action, Transfer
from mpar.spec import P, local_shape
from mpar.strategy import Strategy

__all__ = ["Step", "write_part"]


@dataclass(frozen=True)
class Step:
    """What all parts of one training step have in common.

    units: of the whole model, by path. codes: per segment. boundary: per segment, leaves of the x that enters it, local and
    without data, with their specs.
    """

    model: Chain
    optimizer: Any | None
    strategy: Strategy
    mesh: Mesh
    precision: Precision
    batch: dict[str, Tensor]
    num_microbatches: int
    bucket_bytes: int
    prefetch_bytes: int
    offload: bool
    writer: Writer
    units: dict[str, Unit]
    context_code: Code
    weight_code: Code
    codes: list[SegmentCode]
    boundary: list[list[tuple[Tensor, P]]]
    pipeline: Pipeline

    @functools.cached_property
    def width(self) -> int:
        """Messages are numbered with room for this many leaves on each edge of the pipeline."""
        return max(len(leaves) for leaves in self.boundary) or 1


def write_part(step: Step, position: int) -> Part:
    """Write all instructions of one position along pp."""
    return _PartWriter(step, position).write()


@dataclass
class _Saved:
    """What a forward leaves for its backward: the segment's input and what it kept; and what the input half of it leaves."""

    x: list[int]
    kept: list[int]
    dy: list[int] | None = None
    crossing: list[int] | None = None
    away: bool = False  # in the memory of the host


class _PartWriter:
    def __init__(self, step: Step, position: int) -> None:
        self.step, self.position, self.writer = step, position, step.writer
        self.segments = step.model.segments
        self.pipeline = step.pipeline
        self.stages = self.pipeline.stages_at(position)
        step.writer.begin()
        held = {i for stage in self.stages for i in self.pipeline.ranges[stage]}
        self.units = {path: unit for path, unit in step.units.items() if held & set(unit.users)}
        self.state_in, self.params, self.slots = self._state()
        self.batch_leaves, self.batch_values = self._batch()
        self.scalars = [
            self.writer.leaf(name, torch.empty((), dtype=torch.float64, device="meta"), P()) for name in ("lr", "step")
        ]
        groups = {stage: self._groups(self.pipeline.ranges[stage]) for stage in self.stages}
        own = self.pipeline.table[position]
        self.undivided = frozenset(
            (stage, m) for stage, kind, m in own if kind == "B" or (kind == "W" and self.pipeline.ranges[stage].start == 0)
        )
        self.forwards = frozenset(action for action in own if action.kind == "F")
        last = {action.stage: action.microbatch for action in own if action.kind in "BW"}
        copies = {stage: self.pipeline.positions[stage].index(position) for stage in self.stages}
        self.gathers = Gathers(self.writer, groups, self.params, self._uses(), step.strategy.gather == "keep")
        self.gradients = Gradients(self.writer, groups, step.precision, step.strategy, last, copies)
        self.copies = copies
        self.contributions: dict[int, tuple[str, str, int]] = {}
        self.whole_losses: dict[int, tuple[str, int, int]] = {}
        self.contexts: dict[int, list[int]] = {}
        self.inputs: dict[tuple[int, int], list[int]] = {}  # (stage, microbatch) -> x that enters it
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.cotangents: dict[tuple[int, int], list[int]] = {}  # of what the stage gives
        self.input_gradients: dict[tuple[int, int], list[int]] = {}
        self.saved: dict[tuple[int, int], dict[int, _Saved]] = {}
        self.losses: dict[tuple[int, int], list[int]] = {}  # (microbatch, segment) -> its losses
        self.sums: dict[int, list[int]] = {}  # segment -> its metrics, added over microbatches
        self.messages: dict[int, list[int]] = {}

    def _state(self) -> tuple[list[Leaf], dict[str, list[int]], dict[str, list[list[int]]]]:
        """Parameters, then the optimizer's slots, as leaves and by unit."""
        leaves: list[Leaf] = []

        def declare(prefix: str, unit: Unit, specs: list[P]) -> list[int]:
            new = [
                self.writer.leaf(f"{prefix}.{path}", leaf, spec) for (path, leaf), spec in zip(unit.leaves, specs, strict=True)
            ]
            leaves.extend(new)
            return [leaf.value for leaf in new]

        params = {path: declare("params", unit, unit.storage) for path, unit in self.units.items()}
        slots: dict[str, list[list[int]]] = {path: [] for path in self.units}
        for slot in self.step.optimizer.slots if self.step.optimizer is not None else ():
            for path, unit in self.units.items():
                slots[path].append(declare(f"opt.{slot}", unit, unit.opt))
        return leaves, params, slots

    def _batch(self) -> tuple[list[Leaf], list[list[int]]]:
        """Every batch key of every microbatch; the microbatches of a key are views of one tensor."""
        step, leaves = self.step, []
        by_microbatch: list[list[int]] = [[] for _ in range(step.num_microbatches)]
        for key, x in step.batch.items():
            spec, storage = step.strategy.compute_spec(step.model.batch_axes[key], step.mesh), self.writer.storage()
            for m, values in enumerate(by_microbatch):
                if x.ndim > 1 or m == 0:  # the order of positions is that of all microbatches
                    leaves.append(self.writer.leaf(f"{key}.{m}", x, spec, storage))
                values.append(leaves[-1].value)
        assert all(local_shape(leaf.shape, leaf.spec, step.mesh) == self.writer.values[leaf.value].shape for leaf in leaves)
        return leaves, by_microbatch

    def _groups(self, own: range) -> list[list[Unit]]:
        """Units that the segments of a stage read, in groups that are gathered and reduced together."""
        units: dict[str, Unit] = {}
        for index in own:
            for path in self.segments[index].paths:
                units.setdefault(path, replace(self.step.units[path], users=[u for u in self.step.units[path].users if u in own]))
        return group_units(list(units.values()), self.step.bucket_bytes)

    def _uses(self) -> list[Use]:
        """Every segment that is run, in order, with the parameters that it reads."""
        uses = []
        for number, action in enumerate(self.pipeline.table[self.position]):
            own = self.pipeline.ranges[action.stage]
            for index in own if action.kind == "F" else reversed(own):
                code, paths = self.step.codes[index], self.segments[index].paths
                whole = self._is_whole(index, action.stage, action.microbatch)
                if whole and action.kind == "F":
                    continue
                if whole or action.kind == "F":
                    if action.kind == "I":
                        continue
                    reads: Sequence[int] = range(code.traced.num_params)
                elif own.start == 0 or action.kind == "B":
                    if action.kind == "I":
                        continue
                    reads = code.reads
                else:
                    split = split_segment(code)
                    reads = split.input_reads if action.kind == "I" else split.weight_reads
                uses.append(Use(number, action.stage, frozenset(self._paths_read(paths, reads))))
        return uses

    def _paths_read(self, paths: Sequence[str], reads: Sequence[int]) -> list[str]:
        """Those of `paths` of whose parameters at least one is at the positions `reads`."""
        out, start = [], 0
        for path in paths:
            end = start + len(self.step.units[path].leaves)
            if any(start <= i < end for i in reads):
                out.append(path)
            start = end
        return out

    def write(self) -> Part:
        """All instructions in order."""
        step = self.step
        total, self.cotangent = self._weights()
        for item in self.pipeline.steps[self.position]:
            if isinstance(item, Transfer):
                self._transfer(item)
            else:
                self._act(item)
        reported = write_metrics(self.writer, [segment.name for segment in self.segments], step.codes, self.sums)
        metrics = write_losses(self.writer, step.codes, step.num_microbatches, self.losses, self.cotangent)
        metrics.append(self.writer.metric("weight", total))
        metrics += [self.writer.metric(name, value) for name, value in reported.items()]
        if step.optimizer is None:
            return self._part(self.state_in, metrics, {})
        finished = self._totals()
        lr, number = (leaf.value for leaf in self.scalars)
        owned = {path for path, unit in self.units.items() if self._holders(unit)[0] == self.position}
        dtype = widest([step.precision.grad_dtype(leaf.dtype) for unit in step.units.values() for _, leaf in unit.leaves])
        norm, scale = write_norm(self.writer, step.optimizer, list(step.units.values()), owned, finished, dtype)
        set_from = {path: (reported[name], fn) for path, (name, fn) in getattr(step.model, "updates", {}).items()}
        new = write_updates(
            self.writer, step.optimizer, list(self.units.values()), self.params, finished, self.slots, lr, number, scale, set_from
        )
        metrics.append(self.writer.metric("grad_norm", norm))
        state_out = [Leaf(leaf.path, new[leaf.path], leaf.shape, leaf.dtype, leaf.spec) for leaf in self.state_in]
        gradients = {p: v for path, unit in self.units.items() for p, v in zip(unit.paths, finished[path], strict=True)}
        return self._part(state_out, metrics, gradients)

    def _part(self, state_out: list[Leaf], metrics: list[Leaf], gradients: dict[str, int]) -> Part:
        """What is written, after the passes."""
        steps = hoist_gathers(advance_sends(self.writer.instructions), self.writer.values, self.step.prefetch_bytes)
        kept = {leaf.value for leaf in (*state_out, *metrics, *self.batch_leaves, *self.scalars)}
        return Part(
            instructions=insert_frees(steps, kept),
            state_in=self.state_in,
            state_out=state_out,
            batch=self.batch_leaves,
            scalars=self.scalars,
            metrics=metrics,
            contributions=self.contributions,
            losses=self.whole_losses,
            gradients=gradients,
        )

    def _weights(self) -> tuple[int, int]:
        """The total weight of the batch, and its reciprocal: the cotangent of every loss."""
        total: int | None = None
        for m, inputs in enumerate(self.batch_values):
            (weight,) = self.writer.emit("weight", self.step.weight_code, inputs, [f"weight.mb{m}"], "", m)
            total = weight if total is None else self.writer.add([total], [weight], ["weight"], "", m)[0]
        assert total is not None
        code = self.writer.function(
            "total", _with_reciprocal, tuple(self.writer.globals([total])), self.writer.specs([total]), [P(), P()]
        )
        total, cotangent = self.writer.emit("weight", code, [total], ["total", "cotangent"])
        return total, cotangent

    def _act(self, action: Action) -> None:
        stage, kind, microbatch = action
        first = self.pipeline.ranges[stage].start == 0  # nobody waits for its backward: all of it is left to W
        if kind == "F":
            self._forward(stage, microbatch)
        elif kind == "B" or (kind == "W" and first):
            self._backward(stage, microbatch)
        elif kind == "W":
            self._backward_weight(stage, microbatch)
        elif first:
            self._hand_back(stage, microbatch, [])  # there may be empty stages before it
        else:
            self._backward_input(stage, microbatch)

    def _context(self, m: int) -> list[int]:
        """The context of a microbatch, made when it is first read."""
        if m not in self.contexts:
            code = self.step.context_code
            names = [f"{path}.mb{m}" for path in tree.paths(self.writer.global_results(code))]
            self.contexts[m] = self.writer.emit("context", code, self.batch_values[m], names, "", m)
        return self.contexts[m]

    def _forward(self, stage: int, m: int) -> None:
        context, x, saved = self._context(m), self.inputs.pop((stage, m), []), {}
        for index in self.pipeline.ranges[stage]:
            segment, code = self.segments[index], self.step.codes[index]
            if self._is_whole(index, stage, m):  # it is done when its backward is due
                saved[index], x = _Saved(x, []), []
                continue
            operands, x_in = [*self.gathers.parameters(segment.paths, m), *x, *context], x
            num_x = len(code.traced.x_out)
            names = [*[f"x{index + 1}.{m}"] * num_x, *self._reported(index, m)]
            names += [f"r{index}.{m}.{i}" for i in range(code.num_kept)]
            out = self.writer.emit("forward", code.forward, operands, names, segment.name, m)
            x, reported, kept = out[:num_x], out[num_x : code.traced.num_results], out[code.traced.num_results :]
            saved[index] = self._offloaded(_Saved(x_in, kept), segment.name, m)
            self._report(index, m, reported)
            self.gathers.next_use()
        self.saved[stage, m] = saved
        self.outputs[stage, m] = x
        if self._is_here(stage + 1, m):
            self.inputs[stage + 1, m] = x

    def _offloaded(self, saved: _Saved, segment: str, m: int) -> _Saved:
        """What waits for the backward, in the memory of the host if the policy says so."""
        if not self.step.offload:
            return saved
        x, kept = ([self.writer.carry("offload", v, segment, m) for v in own] for own in (saved.x, saved.kept))
        return _Saved(x, kept, away=True)

    def _fetch(self, stage: int, m: int, index: int) -> None:
        """Bring back what a segment left, if it is away."""
        saved = self.saved[stage, m].get(index)
        if saved is not None and saved.away:
            name = self.segments[index].name
            saved.x, saved.kept = ([self.writer.carry("fetch", v, name, m) for v in own] for own in (saved.x, saved.kept))
            saved.away = False

    def _before(self, stage: int, m: int, index: int) -> _Saved:
        """What a segment's forward left for its backward; that of the segment whose turn is next is on its way then."""
        for due in (index, index - 1):
            self._fetch(stage, m, due)
        return self.saved[stage, m][index]

    def _backward(self, stage: int, m: int) -> None:
        dx = self.cotangents.pop((stage, m), [])
        for index in reversed(self.pipeline.ranges[stage]):
            segment, code, before = self.segments[index], self.step.codes[index], self._before(stage, m, index)
            del self.saved[stage, m][index]
            primals = [*self.gathers.parameters(segment.paths, m), *before.x, *self._context(m)]
            cotangents = [*dx, *[self.cotangent] * len(code.traced.losses)]
            paths = self._leaf_paths(index)
            names = [*(f"d {path}.mb{m}" for path in paths), *[f"dx{index}.{m}"] * len(before.x)]
            if code.whole is not None and self._is_whole(index, stage, m):
                reported = self._reported(index, m)
                out = self.writer.emit("backward", code.whole, [*primals, *cotangents], [*reported, *names], segment.name, m)
                self._report(index, m, out[: len(reported)])
                out = out[len(reported) :]
                self.whole_losses |= {v: (segment.name, m, n) for n, v in enumerate(self.losses[m, index])}
            else:
                operands = [*(primals[i] for i in code.reads), *before.kept, *cotangents]
                out = self.writer.emit("backward", code.backward, operands, names, segment.name, m)
            self._take(stage, index, out[: len(paths)], m)
            dx = out[len(paths) :]
            self.gathers.next_use()
        self._hand_back(stage, m, dx)

    def _backward_input(self, stage: int, m: int) -> None:
        dx = self.cotangents.pop((stage, m), [])
        for index in reversed(self.pipeline.ranges[stage]):
            segment, code, before = self.segments[index], self.step.codes[index], self._before(stage, m, index)
            split = split_segment(code)
            primals = [*self.gathers.parameters(segment.paths, m), *before.x, *self._context(m)]
            before.dy = [*dx, *[self.cotangent] * len(code.traced.losses)]
            operands = [
                *(primals[i] for i in split.input_reads),
                *(before.kept[i] for i in split.input_kept),
                *(before.dy[i] for i in split.input_cotangents),
            ]
            names = [*[f"dx{index}.{m}"] * len(before.x), *(f"c{index}.{m}.{i}" for i in range(split.num_crossing))]
            out = self.writer.emit("backward_input", split.input, operands, names, segment.name, m)
            dx, before.crossing = out[: len(before.x)], out[len(before.x) :]
            self.gathers.next_use()
        self._hand_back(stage, m, dx)

    def _backward_weight(self, stage: int, m: int) -> None:
        saved = self.saved.pop((stage, m))
        for index in reversed(self.pipeline.ranges[stage]):
            segment, code, before = self.segments[index], self.step.codes[index], saved.pop(index)
            split = split_segment(code)
            assert before.dy is not None and before.crossing is not None
            primals = [*self.gathers.parameters(segment.paths, m), *before.x, *self._context(m)]
            operands = [
                *(primals[i] for i in split.weight_reads),
                *(before.kept[i] for i in split.weight_kept),
                *before.crossing,
                *(before.dy[i] for i in split.weight_cotangents),
            ]
            names = [f"d {path}.mb{m}" for path in self._leaf_paths(index)]
            out = self.writer.emit("backward_weight", split.weight, operands, names, segment.name, m)
            self._take(stage, index, out, m)
            self.gathers.next_use()

    def _reported(self, index: int, m: int) -> list[str]:
        """Names of a segment's losses and metrics."""
        traced = self.step.codes[index].traced
        return [f"{name}.{index}.{m}" for name in (*traced.losses, *traced.metrics)]

    def _report(self, index: int, m: int, values: list[int]) -> None:
        """Take a segment's losses, and add its metrics to those of other microbatches."""
        num_losses, name = len(self.step.codes[index].traced.losses), self.segments[index].name
        self.losses[m, index], metrics = values[:num_losses], values[num_losses:]
        if metrics and index in self.sums:
            names = [f"{metric}.{index}" for metric in self.step.codes[index].traced.metrics]
            metrics = self.writer.add(self.sums[index], metrics, names, name, m)
        self.sums[index] = metrics

    def _is_whole(self, index: int, stage: int, m: int) -> bool:
        """Whether a segment's forward and backward are one: it gives losses only, and its backward is not cut in two."""
        return self.step.codes[index].whole is not None and (stage, m) in self.undivided

    def _leaf_paths(self, index: int) -> list[str]:
        return [path for unit in self._units_of(index) for path in unit.paths]

    def _units_of(self, index: int) -> list[Unit]:
        return [self.step.units[path] for path in self.segments[index].paths]

    def _take(self, stage: int, index: int, grads: list[int], m: int) -> None:
        """Add a segment's gradients to their sums."""
        segment = self.segments[index]
        use = segment.name + "'" * self.copies[stage]
        self.contributions |= {v: (path, use, m) for v, path in zip(grads, self._leaf_paths(index), strict=True)}
        for unit in self._units_of(index):
            self.gradients.take(stage, index, segment.paths, unit, grads[: len(unit.leaves)], m)
            grads = grads[len(unit.leaves) :]

    def _hand_back(self, stage: int, m: int, dx: list[int]) -> None:
        self.input_gradients[stage, m] = dx
        if self._is_here(stage - 1, m):
            self.cotangents[stage - 1, m] = dx

    def _is_here(self, stage: int, m: int) -> bool:
        """Whether this position runs the stage on that microbatch: a value then passes without a message."""
        return Action(stage, "F", m) in self.forwards

    def _transfer(self, item: Transfer) -> None:
        """Messages of one edge, one for each leaf of x."""
        width, m = self.step.width, item.microbatch
        numbers = range(item.message * width, (item.message + 1) * width)
        name = f"stage {item.stage}"
        if item.op == "send":
            values = (self.outputs if item.kind == "F" else self.input_gradients).pop((item.stage, m))
            for value, number in zip(values, numbers, strict=False):
                self.writer.send(value, number, item.peer, name, m, f"->{item.peer} {item.kind}")
            self.messages[item.message] = values
        elif item.op == "recv":
            own = self.pipeline.ranges[item.stage]
            index, prefix = (own.start, "x") if item.kind == "F" else (own.stop, "dx")
            values = [
                self.writer.receive(f"{prefix}{index}.{m}", x, spec, number, item.peer, name, m, f"<-{item.peer} {item.kind}")
                for (x, spec), number in zip(self.step.boundary[index], numbers, strict=False)
            ]
            (self.inputs if item.kind == "F" else self.cotangents)[item.stage, m] = values
            self.messages[item.message] = values
        else:
            for value, number in zip(self.messages.pop(item.message), numbers, strict=False):
                self.writer.wait(value, number, item.peer, name, m)

    def _holders(self, unit: Unit) -> list[int]:
        """Positions along pp that hold the unit, in the order of its uses."""
        return list(dict.fromkeys(at for _, _, at in self.pipeline.uses(unit.users)))

    def _totals(self) -> dict[str, list[int]]:
        """The finished gradients of each unit: its uses, those on other ranks among them, added in chain order."""
        uses = {path: self.pipeline.uses(unit.users) for path, unit in self.units.items()}
        names = [use_name(path, index, copy) for path, own in uses.items() for index, copy, at in own if at == self.position]
        parts = {name: self.gradients.take_reduced(name) for name in names}
        parts |= exchange_gradients(self.writer, self.step.mesh, self.step.precision, self.position, self._shared(), parts)
        out = {}
        for path, unit in self.units.items():
            first, *rest = (parts[use_name(path, index, copy)] for index, copy, _ in uses[path])
            for other in rest:
                first = self.writer.add(first, other, [f"g {p}" for p in unit.paths], path)
            out[path] = first
        return out

    def _shared(self) -> SharedUses:
        """What several positions hold, and from which message number on their gradients travel."""
        used = (item.message for own in self.pipeline.steps for item in own if isinstance(item, Transfer))
        number = (max(used, default=-1) + 1) * self.step.width
        units = {path: unit for path, unit in self.step.units.items() if len(self._holders(unit)) > 1}
        return SharedUses(units, {path: self.pipeline.uses(unit.users) for path, unit in units.items()}, number)


def _with_reciprocal(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and its reciprocal; 0 for a batch in which nothing counts, whose loss and gradients are then 0."""
    return weight, torch.where(weight == 0, 0.0, 1.0 / torch.where(weight == 0, 1.0, weight))
