"""Build: the chain, the microbatches and the optimizer become one list of instructions.

The order of a step: weights of all microbatches; per microbatch the context, the segments forward, the segments backward;
gradient reduction after the last use; norm; update; metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Chain, Segment
from mpar.errors import ConfigError, ShapeError
from mpar.mesh import Mesh
from mpar.precision import Precision, precision
from mpar.program._partition import RecomputePolicy, policy
from mpar.program._passes import hoist_gathers, insert_frees
from mpar.program._program import Instruction, Leaf, Program, Value
from mpar.program._segments import Code, SegmentCode, compile_function, compile_segment, trace_segment
from mpar.program._update import compile_norm, compile_squares, compile_update
from mpar.spec import P, local_shape
from mpar.strategy import Strategy, preset

__all__ = ["compile_step"]

BUCKET_BYTES = 32 * 2**20  # gathers and reductions of units are joined up to this size: beyond it, bandwidth hides latency


@dataclass
class _Unit:
    """The parameters at one path of the chain: stored, gathered, reduced and updated together."""

    path: str
    leaves: list[tuple[str, Tensor]]
    axes: list[tuple]
    compute: list[P]
    compute_dtypes: list[torch.dtype]
    storage: list[P]
    grad: list[P]
    opt: list[P]
    users: list[int] = field(default_factory=list)

    @property
    def needs_gather(self) -> bool:
        same = all(d == leaf.dtype for d, (_, leaf) in zip(self.compute_dtypes, self.leaves, strict=True))
        return self.compute != self.storage or not same

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for _, leaf in self.leaves)


def compile_step(
    model: Chain,
    optimizer: Any,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: tuple[int, int] | Mapping[str, tuple[tuple[int, int], torch.dtype]],
    *,
    schedule: str | None = None,
    num_microbatches: int = 1,
    precision: Precision | str | None = None,
    recompute: RecomputePolicy | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int = 0,
) -> Program:
    """Compile one training step: forward, backward, reduction, clipping and update, for every rank of `mesh`.

    batch_shape:  (B, S) of the global batch, all microbatches together, of tokens and labels; or for each batch key its shape
                  and dtype.
    schedule:     the order of microbatches over pipeline stages; one stage has only one order, so only None is accepted yet.
    precision:    "fp32", "bf16" or a Precision. recompute: none, full, selective, budget, or a RecomputePolicy.
    bucket_bytes: gathers and reductions of neighbouring units are joined into messages up to this size.
    prefetch_bytes: gathers that make at most this much are issued one group early, to overlap with its computation.
    Raises ShardingError, ShapeError or ConfigError, listing all offenders.
    """
    if schedule is not None or mesh.axis_size("pp") > 1:
        raise ConfigError(
            f"cannot compile schedule={schedule!r} on {mesh}: pipeline stages are not built yet; use pp=1 and no schedule"
        )
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    recompute = recompute if isinstance(recompute, RecomputePolicy) else policy(recompute)
    builder = _Builder(model, optimizer, mesh, strategy, _precision(precision), recompute, num_microbatches, bucket_bytes, prefetch_bytes)
    return builder.build(_batch_values(batch_shape, num_microbatches))


def _precision(given: Precision | str | None) -> Precision:
    return precision(given)


def _batch_values(batch_shape: Any, num_microbatches: int) -> dict[str, Tensor]:
    """Values without data of one microbatch."""
    if not isinstance(batch_shape, Mapping):
        batch_shape = {key: (tuple(batch_shape), torch.int64) for key in ("tokens", "labels")}
    rows = {key: shape[0] for key, (shape, _) in batch_shape.items()}
    bad = {key: n for key, n in rows.items() if n % num_microbatches or n < 1}
    if bad or num_microbatches < 1:
        raise ShapeError(f"cannot cut a batch of {rows} rows into {num_microbatches} equal microbatches")
    return {
        key: torch.empty((shape[0] // num_microbatches, *shape[1:]), dtype=dtype, device="meta")
        for key, (shape, dtype) in batch_shape.items()
    }


class _Builder:
    def __init__(
        self,
        model: Chain,
        optimizer: Any,
        mesh: Mesh,
        strategy: Strategy,
        precision: Precision,
        recompute: RecomputePolicy,
        num_microbatches: int,
        bucket_bytes: int,
        prefetch_bytes: int,
    ) -> None:
        self.model, self.optimizer, self.precision, self.recompute = model, optimizer, precision, recompute
        self.public_mesh, self.num_microbatches, self.bucket_bytes = mesh, num_microbatches, bucket_bytes
        self.prefetch_bytes = prefetch_bytes
        self.strategy, self.mesh = strategy.refine(mesh, model.abstract_params, model.param_axes)
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.kinds: dict[str, Any] = {}
        self.num_storages = 0
        self.cache: dict[Any, Any] = {}
        self.segments = model.segments
        self.units = self._units()

    # ---- values and instructions

    def storage(self) -> int:
        self.num_storages += 1
        return self.num_storages - 1

    def value(self, name: str, like: Tensor, spec: P, storage: int | None = None) -> int:
        self.values.append(
            Value(
                name, tuple(like.shape), like.dtype, spec, self.storage() if storage is None else storage, like.storage_offset()
            )
        )
        return len(self.values) - 1

    def emit(
        self,
        op: str,
        code: Code,
        inputs: Sequence[int],
        names: Sequence[str],
        segment: str = "",
        microbatch: int = -1,
        queue: str = "compute",
    ) -> list[int]:
        """Add an instruction; its results share storages with each other and with operands as the code says."""
        assert len(inputs) == len(code.in_specs), (op, segment, len(inputs), len(code.in_specs))
        kind, memory = code.kind, code.kind.memory
        name = self._register(code)
        known = {local: self.values[value].storage for local, value in zip(memory.inputs, inputs, strict=True)}
        outputs = []
        for label, like, spec, local in zip(names, code.out_values, code.out_specs, memory.outputs, strict=True):
            if local not in known:
                known[local] = self.storage()
            outputs.append(self.value(label, like, spec, known[local]))
        self.instructions.append(Instruction(op, name, tuple(inputs), tuple(outputs), (), segment, microbatch, queue))
        assert kind is not None
        return outputs

    def _register(self, code: Code) -> str:
        if id(code) not in self.cache:
            base, number = code.kind.name, 2
            name = base
            while name in self.kinds:
                name, number = f"{base} #{number}", number + 1
            self.kinds[name] = code.kind
            self.cache[id(code)] = (name, code)
        return self.cache[id(code)][0]

    # ---- parameters

    def _units(self) -> dict[str, _Unit]:
        units: dict[str, _Unit] = {}
        for index, segment in enumerate(self.segments):
            for path in segment.paths:
                if path not in units:
                    units[path] = self._unit(path)
                units[path].users.append(index)
        return units

    def _unit(self, path: str) -> _Unit:
        leaves = [
            (f"{path}.{sub}" if sub else path, leaf)
            for sub, leaf in tree.leaves_with_path(tree.get(self.model.abstract_params, path))
        ]
        axes = [tuple(tree.get(self.model.param_axes, leaf_path)) for leaf_path, _ in leaves]
        strategy, mesh = self.strategy, self.mesh
        return _Unit(
            path,
            leaves,
            axes,
            [strategy.compute_spec(a, mesh) for a in axes],
            [self.precision.compute_dtype(p, leaf.dtype) for p, leaf in leaves],
            [strategy.storage_spec(a, "param", mesh) for a in axes],
            [strategy.storage_spec(a, "grad", mesh) for a in axes],
            [strategy.storage_spec(a, "opt", mesh) for a in axes],
        )

    def _groups(self) -> list[list[_Unit]]:
        """Neighbouring units whose gathers and reductions share messages."""
        groups: list[list[_Unit]] = []
        for unit in self.units.values():
            if groups and sum(u.bytes for u in groups[-1]) + unit.bytes <= self.bucket_bytes:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return groups

    # ---- the step

    def build(self, batch: dict[str, Tensor]) -> Program:
        unknown = sorted(set(batch) - set(self.model.batch_axes))
        if unknown:
            raise ConfigError(f"batch keys {unknown} are not read by the model, which knows {sorted(self.model.batch_axes)}")
        shapes = {key: (tuple(value.shape), self.model.batch_axes[key]) for key, value in batch.items()}
        self.strategy.check(self.mesh, self.model.abstract_params, self.model.param_axes, shapes)
        self.batch = batch
        self.groups = self._groups()
        state_in = self._state_in()
        batch_leaves = self._batch_leaves()
        scalars = self._scalars()
        self._compile_context()
        self._compile_segments()
        self._weights()
        self.raw: dict[str, list[int]] = {}  # by use, as backward gives them
        self.grads: dict[str, list[int]] = {}  # by use, reduced
        self.losses: list[int] = []
        self.contributions: dict[int, tuple[str, str, int]] = {}
        self.gathered: dict[str, list[int]] = {}
        for microbatch in range(self.num_microbatches):
            self._microbatch(microbatch)
        metrics = self._finish()
        state_out = self._update(state_in)
        metrics.append(self._metric("grad_norm", self.norm))
        steps = hoist_gathers(self.instructions, self.values, self.prefetch_bytes)
        steps = insert_frees(steps, keep={leaf.value for leaf in (*state_out, *metrics, *batch_leaves, *scalars)})
        info = {
            "optimizer": self.optimizer,
            "public_mesh": self.public_mesh,
            "strategy": self.strategy.name,
            "reduce": "each" if self.strategy.reduces_each else "last",
            "batch": {key: tuple(value.shape) for key, value in batch.items()},
            "recompute": self.recompute.kind,
            "fallbacks": sorted({op for code, _ in self._codes() for op in code.fallbacks}),
            "num_storages": self.num_storages,
        }
        program = Program(
            self.mesh,
            self.values,
            self.kinds,
            steps,
            state_in,
            state_out,
            batch_leaves,
            scalars,
            metrics,
            self.num_microbatches,
            self.contributions,
            {path: v for unit in self.units.values() for (path, _), v in zip(unit.leaves, self.final[unit.path], strict=True)},
            info,
        )
        program.verify()
        return program

    def _codes(self) -> list[tuple[Code, str]]:
        return [(entry[1], entry[0]) for entry in self.cache.values() if isinstance(entry, tuple) and isinstance(entry[1], Code)]

    def _state_in(self) -> list[Leaf]:
        leaves = []
        self.params: dict[str, list[int]] = {}
        for unit in self.units.values():
            self.params[unit.path] = []
            for (path, leaf), spec in zip(unit.leaves, unit.storage, strict=True):
                leaves.append(self._leaf(f"params.{path}", leaf, spec))
                self.params[unit.path].append(leaves[-1].value)
        self.slots: dict[tuple[str, str], list[int]] = {}
        for slot in self.optimizer.slots:
            for unit in self.units.values():
                self.slots[slot, unit.path] = []
                for (path, leaf), spec in zip(unit.leaves, unit.opt, strict=True):
                    leaves.append(self._leaf(f"opt.{slot}.{path}", leaf, spec))
                    self.slots[slot, unit.path].append(leaves[-1].value)
        return leaves

    def _leaf(self, path: str, like: Tensor, spec: P) -> Leaf:
        local = torch.empty(local_shape(tuple(like.shape), spec, self.mesh), dtype=like.dtype, device="meta")
        return Leaf(path, self.value(path, local, spec), tuple(like.shape), like.dtype, spec)

    def _batch_leaves(self) -> list[Leaf]:
        leaves = []
        self.batch_values: list[list[int]] = [[] for _ in range(self.num_microbatches)]
        for key, like in self.batch.items():
            spec = self.strategy.compute_spec(self.model.batch_axes[key], self.mesh)
            shape = local_shape(tuple(like.shape), spec, self.mesh)
            storage = self.storage()  # the microbatches of a key are views of one tensor
            for microbatch in range(self.num_microbatches):
                value = self.value(f"{key}.mb{microbatch}", torch.empty(shape, dtype=like.dtype, device="meta"), spec, storage)
                leaves.append(Leaf(f"{key}.{microbatch}", value, tuple(like.shape), like.dtype, spec))
                self.batch_values[microbatch].append(value)
        return leaves

    def _scalars(self) -> list[Leaf]:
        out = []
        for name in ("lr", "step"):
            value = self.value(name, torch.empty((), dtype=torch.float64, device="meta"), P())
            out.append(Leaf(name, value, (), torch.float64, P()))
        self.lr, self.step = (leaf.value for leaf in out)
        return out

    def _compile_context(self) -> None:
        specs = [self.strategy.compute_spec(self.model.batch_axes[key], self.mesh) for key in self.batch]
        self.context_code = compile_function(
            "context", self.model.context, (self.batch,), self.mesh, specs, table=self.strategy.compute, resolve=True
        )
        self.weight_code = compile_function(
            "weight", self.model.weight, (self.batch,), self.mesh, specs, table=self.strategy.compute
        )

    def _compile_segments(self) -> None:
        """One compilation for each kind: equal functions on equal values are one."""
        self.codes: list[SegmentCode] = []
        context = tree.unflatten(self.context_code.outputs, self.context_code_globals())
        x: Any = None
        x_specs: list[P] = []
        done: dict[Any, SegmentCode] = {}
        for segment in self.segments:
            params = [
                tree.unflatten(
                    tree.flatten(tree.get(self.model.abstract_params, path))[1],
                    [
                        _like(leaf, dtype)
                        for (_, leaf), dtype in zip(self.units[path].leaves, self.units[path].compute_dtypes, strict=True)
                    ],
                )
                for path in segment.paths
            ]
            param_specs = [spec for path in segment.paths for spec in self.units[path].compute]
            traced = trace_segment(segment, params, x, context)
            out_specs = self._out_specs(segment, len(traced.x_out))
            key = (id(traced), tuple(param_specs), tuple(x_specs), tuple(out_specs))
            if key not in done:
                done[key] = compile_segment(
                    segment.name.split(".")[0],
                    traced,
                    self.mesh,
                    self.strategy,
                    param_specs,
                    x_specs,
                    self.context_code.out_specs,
                    out_specs,
                    self.recompute,
                )
            self.codes.append(done[key])
            x = tree.unflatten(traced.x_structure, traced.x_out) if traced.x_out else None
            x_specs = out_specs

    def context_code_globals(self) -> list[Tensor]:
        """Global values without data of what the context function returns."""
        return [
            torch.empty([n * self.mesh.axis_size(spec.dim(i)) for i, n in enumerate(v.shape)], dtype=v.dtype, device="meta")
            for v, spec in zip(self.context_code.out_values, self.context_code.out_specs, strict=True)
        ]

    def _out_specs(self, segment: Segment, num_leaves: int) -> list[P]:
        axes = tree.leaves(
            segment.out_axes, is_leaf=lambda a: isinstance(a, tuple) and all(b is None or isinstance(b, str) for b in a)
        )
        return [self.strategy.compute_spec(a, self.mesh) for a in axes[:num_leaves]] if num_leaves else []

    def _weights(self) -> None:
        """The total weight of the batch, and its reciprocal: the cotangent of every loss."""
        total: int | None = None
        for microbatch, inputs in enumerate(self.batch_values):
            (weight,) = self.emit("weight", self.weight_code, inputs, [f"weight.mb{microbatch}"], "", microbatch)
            total = weight if total is None else self._add([total], [weight], ["weight"], "", microbatch)[0]
        assert total is not None
        like, spec = _like(self.weight_code.out_values[0]), self.weight_code.out_specs[0]
        code = self._function("total", lambda w: (w, 1.0 / w), (like,), [spec], [P(), P()])
        self.total, self.cotangent = self.emit("weight", code, [total], ["total", "cotangent"])

    def _function(self, name: str, fn: Any, args: tuple, in_specs: Sequence[P], out_specs: Sequence[P | None] | None) -> Code:
        key = (name, tuple((tuple(a.shape), a.dtype) for a in tree.leaves(args)), tuple(in_specs), tuple(out_specs or ()))
        if key not in self.cache:
            self.cache[key] = compile_function(name, fn, args, self.mesh, in_specs, out_specs, self.strategy.compute)
        return self.cache[key]

    def _add(self, left: list[int], right: list[int], names: list[str], segment: str, microbatch: int) -> list[int]:
        """`left + right`, value by value, on each rank: pending sums stay pending."""
        specs = [self.values[v].spec for v in (*left, *right)]
        globals_ = [self._global(v) for v in (*left, *right)]
        n = len(left)
        code = self._function(
            "add", lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (globals_[:n], globals_[n:]), specs, specs[:n]
        )
        return self.emit("accumulate", code, [*left, *right], names, segment, microbatch)

    def _global(self, value: int) -> Tensor:
        v = self.values[value]
        return torch.empty([n * self.mesh.axis_size(v.spec.dim(i)) for i, n in enumerate(v.shape)], dtype=v.dtype, device="meta")

    # ---- one microbatch

    def _microbatch(self, m: int) -> None:
        names = [f"{path}.mb{m}" for path in tree.paths(tree.unflatten(self.context_code.outputs, self.context_code.out_values))]
        self.context = self.emit("context", self.context_code, self.batch_values[m], names, "", m)
        x: list[int] = []
        saved: list[tuple[list[int], list[int]]] = []  # per segment: its operands, what it kept
        for index, segment in enumerate(self.segments):
            code = self.codes[index]
            params = self._gather_for(index, m)
            operands = [*params, *x, *self.context]
            num_x, num_losses = len(code.traced.x_out), len(code.traced.losses)
            labels = [*(f"x{index + 1}.{m}" for _ in range(num_x)), *(f"{name}.{index}.{m}" for name in code.traced.losses)]
            labels += [f"r{index}.{m}.{i}" for i in range(code.num_kept)]
            out = self.emit("forward", code.forward, operands, labels, segment.name, m)
            saved.append((x, out[num_x + num_losses :]))
            x, losses = out[:num_x], out[num_x : num_x + num_losses]
            self.losses.extend(losses)
            self._drop_gathered(index, backward=False)
        self._backward(m, saved)

    def _backward(self, m: int, saved: list[tuple[list[int], list[int]]]) -> None:
        dx: list[int] = []
        for index in reversed(range(len(self.segments))):
            segment, code = self.segments[index], self.codes[index]
            params = self._gather_for(index, m, code.reads)
            x, kept = saved[index]
            primals = [*params, *x, *self.context]
            operands = [*(primals[i] for i in code.reads), *kept, *dx, *[self.cotangent] * len(code.traced.losses)]
            paths = [path for p in segment.paths for path, _ in self.units[p].leaves]
            labels = [*(f"d {path}.mb{m}" for path in paths), *(f"dx{index}.{m}" for _ in x)]
            out = self.emit("backward", code.backward, operands, labels, segment.name, m)
            grads, dx = out[: len(paths)], out[len(paths) :]
            self.contributions |= {v: (path, f"{segment.name}", m) for v, path in zip(grads, paths, strict=True)}
            for path in segment.paths:
                count = len(self.units[path].leaves)
                self._take_gradients(index, path, grads[:count], m)
                grads = grads[count:]
            self._drop_gathered(index, backward=True)

    # ---- gathers

    def _group_of(self, path: str) -> list[_Unit]:
        return next(group for group in self.groups if any(unit.path == path for unit in group))

    def _gather_for(self, index: int, m: int, reads: Sequence[int] | None = None) -> list[int]:
        """The values of the parameters of segment `index`, gathered with their group if they are not there yet.

        `reads`: positions of those that are wanted; a path without any is not gathered, and -1 stands for its values.
        """
        out: list[int] = []
        for path in self.segments[index].paths:
            count = len(self.units[path].leaves)
            wanted = reads is None or any(len(out) <= i < len(out) + count for i in reads)
            if wanted and path not in self.gathered:
                self._gather([unit for unit in self._group_of(path) if unit.path not in self.gathered], m)
            out.extend(self.gathered[path] if wanted else [-1] * count)
        return out

    def _gather(self, units: list[_Unit], m: int) -> None:
        todo = [unit for unit in units if unit.needs_gather]
        for unit in units:
            if not unit.needs_gather:
                self.gathered[unit.path] = self.params[unit.path]
        if not todo:
            return
        leaves = [leaf for unit in todo for _, leaf in unit.leaves]
        dtypes = [dtype for unit in todo for dtype in unit.compute_dtypes]
        storage = [spec for unit in todo for spec in unit.storage]
        compute = [spec for unit in todo for spec in unit.compute]
        code = self._cast(f"gather {_kind_name(todo)}", leaves, dtypes, storage, compute)
        names = [f"w {path}" for unit in todo for path, _ in unit.leaves]
        out = self.emit("gather", code, [v for unit in todo for v in self.params[unit.path]], names, _span(todo), m, "gather")
        for unit in todo:
            self.gathered[unit.path], out = out[: len(unit.leaves)], out[len(unit.leaves) :]

    def _cast(self, name: str, leaves: list[Tensor], dtypes: list[torch.dtype], source: list[P], target: list[P]) -> Code:
        key = ("cast", name, tuple(dtypes))
        if key not in self.cache:
            self.cache[key] = {}

        def cast(values: list[Tensor]) -> list[Tensor]:
            return [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]

        inner = (tuple((tuple(t.shape), t.dtype) for t in leaves), tuple(source), tuple(target))
        if inner not in self.cache[key]:
            self.cache[key][inner] = compile_function(name, cast, (leaves,), self.mesh, source, target, self.strategy.compute)
        return self.cache[key][inner]

    def _drop_gathered(self, index: int, *, backward: bool) -> None:
        """Forget gathered values after the last segment of their group, unless the backward that follows reads them at once."""
        if self.strategy.gather == "keep":
            return
        for group in self.groups:
            users = [user for unit in group for user in unit.users]
            last_group = max(users) == len(self.segments) - 1
            over = index == (min(users) if backward else max(users))
            if over and (backward or not last_group):
                for unit in group:
                    self.gathered.pop(unit.path, None)

    # ---- gradients

    def _take_gradients(self, index: int, path: str, grads: list[int], m: int) -> None:
        """Accumulate the gradients of one use of a unit; reduce the unit's group after its last backward."""
        use = f"{path}@{index}"
        if use in self.raw:
            grads = self._add(self.raw[use], grads, [f"g {leaf}" for leaf, _ in self.units[path].leaves], use, m)
        self.raw[use] = grads
        group = self._group_of(path)
        first = min(user for unit in group for user in unit.users)  # its backward comes last
        complete = index == first and path == [p for p in self.segments[index].paths if self._group_of(p) is group][-1]
        if complete and (self.strategy.reduces_each or m == self.num_microbatches - 1):
            self._reduce(group, m)

    def _reduce(self, group: list[_Unit], m: int) -> None:
        uses = [(unit, user) for unit in group for user in unit.users]
        inputs = [v for unit, user in uses for v in self.raw.pop(f"{unit.path}@{user}")]
        leaves = [leaf for unit, _ in uses for _, leaf in unit.leaves]
        sources = [_like(leaf, self.values[v].dtype) for leaf, v in zip(leaves, inputs, strict=True)]
        dtypes = [self.precision.grad_dtype(leaf.dtype) for leaf in leaves]
        specs = [self.values[v].spec for v in inputs]
        target = [spec for unit, _ in uses for spec in unit.grad]
        code = self._cast(f"reduce {_kind_name([unit for unit, _ in uses])}", sources, dtypes, specs, target)
        names = [f"g {path}@{user}" for unit, user in uses for path, _ in unit.leaves]
        out = self.emit("reduce", code, inputs, names, _span([unit for unit, _ in uses]), m, "reduce")
        for unit, user in uses:
            own, out = out[: len(unit.leaves)], out[len(unit.leaves) :]
            key = f"reduced {unit.path}@{user}"
            labels = [f"g {path}" for path, _ in unit.leaves]
            self.grads[key] = self._add(self.grads[key], own, labels, unit.path, m) if key in self.grads else own

    def _final_gradients(self, unit: _Unit) -> list[int]:
        """The uses of a unit, added once, in chain order."""
        total: list[int] | None = None
        for user in unit.users:
            own = self.grads.pop(f"reduced {unit.path}@{user}")
            total = own if total is None else self._add(total, own, [f"g {p}" for p, _ in unit.leaves], unit.path, -1)
        assert total is not None
        return total

    # ---- the end of the step

    def _finish(self) -> list[Leaf]:
        """Mean loss and the loss sum of each microbatch."""
        per_microbatch = len(self.losses) // self.num_microbatches
        likes, specs = [self._global(v) for v in self.losses], [self.values[v].spec for v in self.losses]

        def finish(losses: list[Tensor], cotangent: Tensor) -> tuple[Tensor, Tensor]:
            by_microbatch = torch.stack(losses).reshape(self.num_microbatches, per_microbatch).sum(1)
            by_microbatch = by_microbatch * cotangent
            return by_microbatch.sum(), by_microbatch

        code = self._function("finish", finish, (likes, self._global(self.cotangent)), [*specs, P()], [P(), P()])
        loss, parts = self.emit("finish", code, [*self.losses, self.cotangent], ["loss", "microbatch_losses"])
        return [self._metric("loss", loss), self._metric("microbatch_losses", parts), self._metric("weight", self.total)]

    def _metric(self, path: str, value: int) -> Leaf:
        v = self.values[value]
        return Leaf(path, value, v.shape, v.dtype, v.spec)

    def _update(self, state_in: list[Leaf]) -> list[Leaf]:
        self.final = grads = {path: self._final_gradients(unit) for path, unit in self.units.items()}
        squares: list[int] = []
        for path, unit in self.units.items():
            code = compile_squares(self, unit, grads[path])
            squares += self.emit("norm", code, grads[path], [f"squares {path} {i}" for i in range(len(code.out_specs))], path)
        code = compile_norm(self, squares)
        self.norm, scale = self.emit("norm", code, squares, ["grad_norm", "scale"])
        new: dict[str, int] = {}
        for path, unit in self.units.items():
            slots = [self.slots[slot, path] for slot in self.optimizer.slots]
            code = compile_update(self, unit, grads[path])
            inputs = [*self.params[path], *grads[path], *(v for column in slots for v in column), self.lr, self.step, scale]
            names = [f"params.{p}" for p, _ in unit.leaves] + [
                f"opt.{s}.{p}" for s in self.optimizer.slots for p, _ in unit.leaves
            ]
            out = self.emit("update", code, inputs, names, path)
            new |= dict(zip(names, out, strict=True))
        return [Leaf(leaf.path, new[leaf.path], leaf.shape, leaf.dtype, leaf.spec) for leaf in state_in]


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device="meta")


def _kind_name(units: list[_Unit]) -> str:
    names = list(dict.fromkeys(unit.path.split(".")[0] for unit in units))
    return "+".join(names)


def _span(units: list[_Unit]) -> str:
    return units[0].path if len(units) == 1 else f"{units[0].path}..{units[-1].path}"
