"""Part: the instructions of the ranks at one position along pp, written action by action."""

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import CONTEXT_OF_PAST
from mpar.compiler.build._exchange import SharedUses, exchange_gradients
from mpar.compiler.build._gathers import Gathers, Gradients, Use, use_name
from mpar.compiler.build._held import Held, LeftGradients, Saved
from mpar.compiler.build._passes import advance_sends, hoist_gathers, insert_frees
from mpar.program._program import Leaf, Part
from mpar.compiler.build._report import widest, write_losses, write_metrics
from mpar.compiler.segment._split import split_segment
from mpar.compiler.build._step import Step, declare_batch, declare_state
from mpar.compiler.build._units import Unit, group_units
from mpar.compiler.build._update import write_norm, write_updates
from mpar.schedules import Action, Transfer
from mpar.spec import P

__all__ = ["write_part"]


def write_part(step: Step, position: int) -> Part:
    """Write all instructions of one position along pp."""
    return _PartWriter(step, position).write()


class _PartWriter:
    def __init__(self, step: Step, position: int) -> None:
        self.step, self.position, self.writer = step, position, step.writer
        self.segments = step.model.segments
        self.pipeline = step.pipeline
        self.stages = self.pipeline.stages_at(position)
        step.writer.begin()
        held = {i for stage in self.stages for i in self.pipeline.ranges[stage]}
        self.units = {path: unit for path, unit in step.units.items() if held & set(unit.users)}
        self.state_in, self.params, self.slots = declare_state(step, self.units)
        self.batch_leaves, self.batch_values = declare_batch(step)
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
        self.gradients = Gradients(self.writer, groups, step.precision, step.strategy, last, copies, step.num_slices)
        self.copies = copies
        self.contributions: dict[int, tuple[str, str, int]] = {}
        self.whole_losses: dict[int, tuple[str, int, int]] = {}
        self.left: dict[int, tuple[str, int, int]] = {}
        self.contexts: dict[int, list[int]] = {}
        self.inputs: dict[tuple[int, int], list[Held]] = {}  # (stage, microbatch) -> x that enters it, slice by slice
        self.outputs: dict[tuple[int, int], list[Held]] = {}
        self.cotangents: dict[tuple[int, int], list[Held]] = {}  # of what the stage gives
        self.input_gradients: dict[tuple[int, int], list[Held]] = {}
        self.saved: dict[tuple[int, int], dict[tuple[int, int], Saved]] = {}  # by stage and microbatch; by segment and slice
        self.losses: dict[tuple[int, int], list[int]] = {}  # (piece, segment) -> its losses
        self.sums: dict[int, list[int]] = {}  # segment -> its metrics, added over microbatches
        self.messages: dict[int, list[int]] = {}

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
                codes, paths = self.step.codes[index], self.segments[index].paths
                whole = self._is_whole(index, action.stage, action.microbatch)
                if (whole and action.kind == "F") or (action.kind == "I" and (whole or own.start == 0)):
                    continue
                if whole or action.kind == "F":
                    reads = set(range(codes[0].traced.num_params))
                elif own.start == 0 or action.kind == "B":
                    reads = {i for code in codes for i in code.reads}
                else:
                    halves = map(split_segment, codes)
                    reads = {i for half in halves for i in (half.input_reads if action.kind == "I" else half.weight_reads)}
                uses.append(Use(number, action.stage, frozenset(self._paths_read(paths, reads))))
        return uses

    def _paths_read(self, paths: Sequence[str], reads: Set[int]) -> list[str]:
        """Those of `paths` of whose parameters at least one is at the positions `reads`."""
        out, start = [], 0
        for path in paths:
            end = start + len(self.step.units[path].leaves)
            if any(i in reads for i in range(start, end)):
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
        codes = [own[0] for own in step.codes]  # what they report is the same of every slice
        reported = write_metrics(self.writer, [segment.name for segment in self.segments], codes, self.sums)
        sizes = step.num_microbatches, step.num_slices
        metrics = write_losses(self.writer, codes, sizes, self.losses, self.cotangent)
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
            left=self.left,
            gradients=gradients,
        )

    def _weights(self) -> tuple[int, int]:
        """The total weight of the batch, and its reciprocal: the cotangent of every loss."""
        total: int | None = None
        for piece, inputs in enumerate(self.batch_values):
            (weight,) = self.writer.emit("weight", self.step.weight_code, inputs, [f"weight.mb{self._at(piece)}"], "", piece)
            total = weight if total is None else self.writer.add([total], [weight], ["weight"], "", piece)[0]
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
            self._hand_back(stage, microbatch, self._nothing())  # there may be empty stages before it
        else:
            self._backward_input(stage, microbatch)

    def _at(self, piece: int) -> str:
        """A piece in the names of values: its microbatch, and its slice if there are several."""
        m, c = divmod(piece, self.step.num_slices)
        return f"{m}.{c}" if self.step.num_slices > 1 else f"{m}"

    def _context(self, piece: int) -> list[int]:
        """The context of a piece, made when it is first read."""
        if piece not in self.contexts:
            names = [f"{path}.mb{self._at(piece)}" for path in self._context_paths]
            self.contexts[piece] = self.writer.emit("context", self.step.context_code, self.batch_values[piece], names, "", piece)
        return self.contexts[piece]

    @functools.cached_property
    def _context_paths(self) -> list[str]:
        return tree.paths(self.writer.global_results(self.step.context_code))

    def _past(self, index: int, c: int) -> range:
        """The slices that slice `c` reads in a segment, besides its own."""
        return range(max(0, c - self.step.reach[index]), c)

    def _context_read(self, index: int, m: int, c: int) -> list[int]:
        """What a segment may read besides parameters and x: the context of its slice, and of past ones what belongs to keys."""
        first = m * self.step.num_slices
        own = list(self._context(first + c))
        for j in self._past(index, c):
            past = dict(zip(self._context_paths, self._context(first + j), strict=True))
            own += [past[key] for key in CONTEXT_OF_PAST if key in past]
        return own

    def _here(self, held: list[Held], index: int, m: int, due: Sequence[int]) -> None:
        """Bring back those of slices `due`, the first for now, the others so that they are on their way."""
        for c in due:
            if 0 <= c < len(held):
                held[c] = held[c].fetched(self.writer, self.segments[index].name, m * self.step.num_slices + c)

    def _rest(self, values: list[int], index: int, piece: int, *, last: bool) -> Held:
        """What a slice hands on to the segment that follows: it waits until all slices of this one are done. last: of a stage."""
        held = Held(values)
        if not self.step.offload or self.step.num_slices == 1 or last:
            return held
        return held.sent(self.writer, self.segments[index].name, piece)

    def _forward(self, stage: int, m: int) -> None:
        self._context(m * self.step.num_slices)
        xs, saved = self.inputs.pop((stage, m), self._nothing()), self.saved.setdefault((stage, m), {})
        for index in self.pipeline.ranges[stage]:
            if self._is_whole(index, stage, m):  # it is done when its backward is due
                saved |= {(index, c): Saved(x) for c, x in enumerate(xs)}
                xs = self._nothing()
            else:
                xs = self._forward_slices(stage, index, m, xs, saved)
        self.outputs[stage, m] = xs
        if self._is_here(stage + 1, m):
            self.inputs[stage + 1, m] = xs

    def _nothing(self) -> list[Held]:
        return [Held() for _ in range(self.step.num_slices)]

    def _forward_slices(self, stage: int, index: int, m: int, xs: list[Held], saved: dict[tuple[int, int], Saved]) -> list[Held]:
        segment, name = self.segments[index], self.segments[index].name
        num_x, last = len(self.step.boundary[index + 1]), index == self.pipeline.ranges[stage][-1]
        params, here = self.gathers.parameters(segment.paths, m), list(xs)
        ys: list[Held] = []
        lefts: list[list[int]] = []
        for c, code in enumerate(self.step.codes[index]):
            piece = m * self.step.num_slices + c
            self._here(here, index, m, (c, c + 1))
            past = [v for j in self._past(index, c) for v in lefts[j]]
            operands = [*params, *here[c].values, *past, *self._context_read(index, m, c)]
            num_out, num_results = len(code.traced.x_out), code.traced.num_results
            names = [*[f"x{index + 1}.{self._at(piece)}"] * num_x, *[f"left{index}.{self._at(piece)}"] * (num_out - num_x)]
            names += [*self._reported(index, piece), *(f"r{index}.{self._at(piece)}.{i}" for i in range(code.num_kept))]
            out = self.writer.emit("forward", code.forward, operands, names, name, piece)
            lefts.append(out[num_x:num_out])
            self.left |= {v: (name, piece, n) for n, v in enumerate(lefts[c])}
            own = [xs[c], Held(out[num_results:]), Held(lefts[c])]
            x, kept, left = [held.sent(self.writer, name, piece) for held in own] if self.step.offload else own
            saved[index, c] = Saved(x, kept, left)
            ys.append(self._rest(out[:num_x], index, piece, last=last))
            self._report(index, piece, out[num_out:num_results])
        self.gathers.next_use()
        return ys

    def _before(self, stage: int, m: int, index: int, c: int) -> Saved:
        """What a slice's forward left for its backward; that of the one whose turn is next is on its way then."""
        saved = self.saved[stage, m]
        for at in ((index, c), (index, c - 1) if c else (index - 1, self.step.num_slices - 1)):
            if at not in saved:
                continue
            name, first = self.segments[at[0]].name, m * self.step.num_slices
            own = saved[at]
            own.x, own.kept = (held.fetched(self.writer, name, first + at[1]) for held in (own.x, own.kept))
            for j in self._past(*at):
                saved[at[0], j].left = saved[at[0], j].left.fetched(self.writer, name, first + j)
        return saved[index, c]

    def _primals(self, stage: int, m: int, index: int, c: int, params: list[int]) -> list[int]:
        """Parameters, x, what past slices left, context."""
        saved = self.saved[stage, m]
        past = [v for j in self._past(index, c) for v in saved[index, j].left.values]
        return [*params, *saved[index, c].x.values, *past, *self._context_read(index, m, c)]

    def _backward(self, stage: int, m: int) -> None:
        self._go_back(stage, m, self._whole_backward)

    def _backward_input(self, stage: int, m: int) -> None:
        self._go_back(stage, m, self._input_half)

    def _go_back(self, stage: int, m: int, write: Callable[[int, int, int, int, list[int]], list[int]]) -> None:
        """Through the segments of a stage and, of each, the slices, last first. `write(stage, m, segment, slice, primals)` writes
        what is done for one, and gives the gradients of its x and of what past slices left."""
        dys = self.cotangents.pop((stage, m), self._nothing())
        for index in reversed(self.pipeline.ranges[stage]):
            segment, params, last = self.segments[index], None, index == self.pipeline.ranges[stage][0]
            num_x, dxs = len(self.step.boundary[index]), self._nothing()
            of_left = LeftGradients(self.writer, segment.name, self.step.num_left(index))
            for c, code in reversed(list(enumerate(self.step.codes[index]))):
                piece, before = m * self.step.num_slices + c, self._before(stage, m, index, c)
                self._here(dys, index, m, (c, c - 1))
                params = self.gathers.parameters(segment.paths, m) if params is None else params
                before.dy = [*dys[c].values, *of_left.take(c), *[self.cotangent] * len(code.traced.losses)]
                grads = write(stage, m, index, c, self._primals(stage, m, index, c, params))
                of_left.add(c, piece - c, self._past(index, c), grads[num_x:])
                dxs[c] = self._rest(grads[:num_x], index, piece, last=last)
            self.gathers.next_use()
            dys = dxs
        self._hand_back(stage, m, dys)

    def _whole_backward(self, stage: int, m: int, index: int, c: int, primals: list[int]) -> list[int]:
        code, name, piece = self.step.codes[index][c], self.segments[index].name, m * self.step.num_slices + c
        before, paths = self.saved[stage, m].pop((index, c)), self._leaf_paths(index)
        assert before.dy is not None
        names = [*(f"d {path}.mb{self._at(piece)}" for path in paths), *self._gradient_names(index, m, c)]
        if code.whole is not None and self._is_whole(index, stage, m):
            reported = self._reported(index, piece)
            out = self.writer.emit("backward", code.whole, [*primals, *before.dy], [*reported, *names], name, piece)
            self._report(index, piece, out[: len(reported)])
            out = out[len(reported) :]
            self.whole_losses |= {v: (name, piece, n) for n, v in enumerate(self.losses[piece, index])}
        else:
            operands = [*(primals[i] for i in code.reads), *before.kept.values, *before.dy]
            out = self.writer.emit("backward", code.backward, operands, names, name, piece)
        self._take(stage, index, out[: len(paths)], piece)
        return out[len(paths) :]

    def _input_half(self, stage: int, m: int, index: int, c: int, primals: list[int]) -> list[int]:
        code, name, piece = self.step.codes[index][c], self.segments[index].name, m * self.step.num_slices + c
        split, before = split_segment(code), self.saved[stage, m][index, c]
        assert before.dy is not None
        operands = [
            *(primals[i] for i in split.input_reads),
            *(before.kept.values[i] for i in split.input_kept),
            *(before.dy[i] for i in split.input_cotangents),
        ]
        names = [*self._gradient_names(index, m, c), *(f"c{index}.{self._at(piece)}.{i}" for i in range(split.num_crossing))]
        out = self.writer.emit("backward_input", split.input, operands, names, name, piece)
        before.crossing = out[code.traced.num_x :]
        return out[: code.traced.num_x]

    def _gradient_names(self, index: int, m: int, c: int) -> list[str]:
        """Of the gradients of x, and of what past slices left."""
        first, num_left = m * self.step.num_slices, self.step.num_left(index)
        own = [f"dx{index}.{self._at(first + c)}"] * len(self.step.boundary[index])
        return own + [f"dleft{index}.{self._at(first + j)}" for j in self._past(index, c) for _ in range(num_left)]

    def _backward_weight(self, stage: int, m: int) -> None:
        for index in reversed(self.pipeline.ranges[stage]):
            segment, params = self.segments[index], self.gathers.parameters(self.segments[index].paths, m)
            for c, code in reversed(list(enumerate(self.step.codes[index]))):
                piece, split = m * self.step.num_slices + c, split_segment(code)
                before = self.saved[stage, m][index, c]
                assert before.dy is not None and before.crossing is not None
                primals = self._primals(stage, m, index, c, params)
                operands = [
                    *(primals[i] for i in split.weight_reads),
                    *(before.kept.values[i] for i in split.weight_kept),
                    *before.crossing,
                    *(before.dy[i] for i in split.weight_cotangents),
                ]
                names = [f"d {path}.mb{self._at(piece)}" for path in self._leaf_paths(index)]
                out = self.writer.emit("backward_weight", split.weight, operands, names, segment.name, piece)
                self._take(stage, index, out, piece)
                del self.saved[stage, m][index, c]
            self.gathers.next_use()

    def _reported(self, index: int, piece: int) -> list[str]:
        """Names of a segment's losses and metrics."""
        traced = self.step.codes[index][0].traced
        return [f"{name}.{index}.{self._at(piece)}" for name in (*traced.losses, *traced.metrics)]

    def _report(self, index: int, piece: int, values: list[int]) -> None:
        """Take a segment's losses, and add its metrics to those of other pieces."""
        traced, name = self.step.codes[index][0].traced, self.segments[index].name
        num_losses = len(traced.losses)
        self.losses[piece, index], metrics = values[:num_losses], values[num_losses:]
        if metrics and index in self.sums:
            names = [f"{metric}.{index}" for metric in traced.metrics]
            metrics = self.writer.add(self.sums[index], metrics, names, name, piece)
        self.sums[index] = metrics

    def _is_whole(self, index: int, stage: int, m: int) -> bool:
        """Whether a segment's forward and backward are one: it gives losses only, and its backward is not cut in two."""
        return self.step.codes[index][0].whole is not None and (stage, m) in self.undivided

    def _leaf_paths(self, index: int) -> list[str]:
        return [path for unit in self._units_of(index) for path in unit.paths]

    def _units_of(self, index: int) -> list[Unit]:
        return [self.step.units[path] for path in self.segments[index].paths]

    def _take(self, stage: int, index: int, grads: list[int], piece: int) -> None:
        """Add a segment's gradients to their sums."""
        segment = self.segments[index]
        use = segment.name + "'" * self.copies[stage]
        self.contributions |= {v: (path, use, piece) for v, path in zip(grads, self._leaf_paths(index), strict=True)}
        for unit in self._units_of(index):
            self.gradients.take(stage, index, segment.paths, unit, grads[: len(unit.leaves)], piece)
            grads = grads[len(unit.leaves) :]

    def _hand_back(self, stage: int, m: int, dxs: list[Held]) -> None:
        self.input_gradients[stage, m] = dxs
        if self._is_here(stage - 1, m):
            self.cotangents[stage - 1, m] = dxs

    def _is_here(self, stage: int, m: int) -> bool:
        """Whether this position runs the stage on that microbatch: a value then passes without a message."""
        return Action(stage, "F", m) in self.forwards

    def _transfer(self, item: Transfer) -> None:
        """Messages of one edge, one for each leaf of x of each slice."""
        width, m = self.step.width, item.microbatch
        first = m * self.step.num_slices
        numbers = range(item.message * width, (item.message + 1) * width)
        name = f"stage {item.stage}"
        if item.op == "send":
            held = (self.outputs if item.kind == "F" else self.input_gradients).pop((item.stage, m))
            values = [v for own in held for v in own.values]
            for value, number in zip(values, numbers, strict=False):
                self.writer.send(value, number, item.peer, name, first, f"->{item.peer} {item.kind}")
            self.messages[item.message] = values
        elif item.op == "recv":
            own = self.pipeline.ranges[item.stage]
            index, prefix = (own.start, "x") if item.kind == "F" else (own.stop, "dx")
            leaves, queue = self.step.boundary[index], f"<-{item.peer} {item.kind}"
            places = [(c, x, spec) for c in range(self.step.num_slices) for x, spec in leaves]
            values = [
                self.writer.receive(f"{prefix}{index}.{self._at(first + c)}", x, spec, number, item.peer, name, first, queue)
                for (c, x, spec), number in zip(places, numbers, strict=False)
            ]
            held = [Held(values[c * len(leaves) : (c + 1) * len(leaves)]) for c in range(self.step.num_slices)]
            (self.inputs if item.kind == "F" else self.cotangents)[item.stage, m] = held
            self.messages[item.message] = values
        else:
            for value, number in zip(self.messages.pop(item.message), numbers, strict=False):
                self.writer.wait(value, number, item.peer, name, first)

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
