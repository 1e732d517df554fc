"""Build: the chain, the microbatches and the optimizer become one list of instructions.

The order of a step: weights of all microbatches; per microbatch the context, the segments forward, the segments backward;
gradient reduction after the last use; metrics; norm; update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Chain, Segment
from mpar.errors import ConfigError, ShapeError
from mpar.mesh import Mesh
from mpar.precision import Precision, precision
from mpar.program._gathers import Gathers, Gradients
from mpar.program._partition import RecomputePolicy, policy
from mpar.program._passes import hoist_gathers, insert_frees
from mpar.program._program import Leaf, Program
from mpar.program._segments import SegmentCode, compile_function, compile_segment, trace_segment
from mpar.program._units import Unit, group_units, make_units
from mpar.program._update import write_update
from mpar.program._writer import Writer, like
from mpar.spec import P, local_shape
from mpar.strategy import Strategy, preset

__all__ = ["compile_step"]

BUCKET_BYTES = 32 * 2**20  # gathers and reductions of units are joined up to this size: beyond it, bandwidth hides latency
BatchShape = tuple[int, ...] | Mapping[str, tuple[tuple[int, ...], torch.dtype]]
make_precision = precision  # `compile_step` has a parameter of that name


def compile_step(
    model: Chain,
    optimizer: Any,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    *,
    schedule: str | None = None,
    num_microbatches: int = 1,
    precision: Precision | str | None = None,
    recompute: RecomputePolicy | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int = 0,
) -> Program:
    """Compile one training step: forward, backward, reduction, clipping and update, for every rank of `mesh`.

    batch_shape:    (B, S) of the global batch, all microbatches together, of tokens and labels; or for each batch key its shape
                    and dtype.
    schedule:       the order of microbatches over pipeline stages; one stage has only one order, so only None is accepted yet.
    precision:      "fp32", "bf16" or a Precision. recompute: none, full, selective, budget, or a RecomputePolicy.
    bucket_bytes:   gathers and reductions of neighbouring units are joined into messages up to this size.
    prefetch_bytes: gathers that make at most this much are issued one group early, to overlap with its computation.
    Raises ShardingError, ShapeError or ConfigError, listing all offenders.
    """
    if schedule is not None or mesh.axis_size("pp") > 1:
        raise ConfigError(
            f"cannot compile schedule={schedule!r} on {mesh}: pipeline stages are not built yet; use pp=1 and no schedule"
        )
    public_mesh = mesh
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    recompute = recompute if isinstance(recompute, RecomputePolicy) else policy(recompute)
    batch = _microbatch_values(model, batch_shape, num_microbatches)
    strategy, mesh = strategy.refine(mesh, model.abstract_params, model.param_axes)
    shapes = {key: (tuple(value.shape), model.batch_axes[key]) for key, value in batch.items()}
    strategy.check(mesh, model.abstract_params, model.param_axes, shapes)
    step = _Step(model, optimizer, strategy, mesh, make_precision(precision), recompute, batch, num_microbatches, bucket_bytes)
    info = {
        "optimizer": optimizer,
        "public_mesh": public_mesh,
        "strategy": strategy.name,
        "reduce": "each" if strategy.reduces_each else "last",
        "batch": {key: tuple(value.shape) for key, value in batch.items()},
        "recompute": recompute.kind,
    }
    program = step.write(prefetch_bytes, info)
    program.verify()
    return program


def _microbatch_values(model: Chain, batch_shape: BatchShape, num_microbatches: int) -> dict[str, Tensor]:
    """Values without data of one microbatch."""
    if not isinstance(batch_shape, Mapping):
        batch_shape = {key: (tuple(batch_shape), torch.int64) for key in ("tokens", "labels")}
    unknown = sorted(set(batch_shape) - set(model.batch_axes))
    if unknown:
        raise ConfigError(f"batch keys {unknown} are not read by the model, which knows {sorted(model.batch_axes)}")
    shapes = {key: tuple(shape) for key, (shape, _) in batch_shape.items()}
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes.values()):
        raise ShapeError(f"cannot compile for a batch of {shapes}: every shape must be (B, S) with positive sizes")
    rows = {key: shape[0] for key, shape in shapes.items()}
    if not isinstance(num_microbatches, int) or num_microbatches < 1 or any(n % num_microbatches for n in rows.values()):
        raise ShapeError(f"cannot cut a batch of {rows} rows into {num_microbatches} equal microbatches")
    return {
        key: torch.empty((shape[0] // num_microbatches, *shape[1:]), dtype=dtype, device="meta")
        for key, (shape, dtype) in batch_shape.items()
    }


def _with_reciprocal(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and its reciprocal; 0 for a batch in which nothing counts, whose loss and gradients are then 0."""
    return weight, torch.where(weight == 0, 0.0, 1.0 / torch.where(weight == 0, 1.0, weight))


@dataclass
class _Saved:
    """What a forward leaves for its backward: the segment's input and what it kept."""

    x: list[int]
    kept: list[int]


class _Step:
    """One training step while it is written."""

    def __init__(
        self,
        model: Chain,
        optimizer: Any,
        strategy: Strategy,
        mesh: Mesh,
        precision: Precision,
        recompute: RecomputePolicy,
        batch: dict[str, Tensor],
        num_microbatches: int,
        bucket_bytes: int,
    ) -> None:
        self.model, self.optimizer, self.strategy, self.mesh = model, optimizer, strategy, mesh
        self.batch, self.num_microbatches, self.segments = batch, num_microbatches, model.segments
        self.writer = Writer(mesh, strategy.compute)
        self.units = make_units(model, strategy, mesh, precision)
        groups = group_units(list(self.units.values()), bucket_bytes)
        self.state_in, self.params, self.slots = self._state()
        self.batch_leaves, self.batch_values = self._batch()
        self.scalars = [
            self.writer.leaf(name, torch.empty((), dtype=torch.float64, device="meta"), P()) for name in ("lr", "step")
        ]
        self.gathers = Gathers(self.writer, self.segments, groups, self.params, strategy.gather == "keep")
        self.gradients = Gradients(self.writer, groups, precision, strategy, num_microbatches - 1)
        batch_specs = [strategy.compute_spec(model.batch_axes[key], mesh) for key in batch]
        self.context_code = compile_function(
            "context", model.context, (batch,), mesh, batch_specs, table=strategy.compute, resolve=True
        )
        self.weight_code = compile_function("weight", model.weight, (batch,), mesh, batch_specs, table=strategy.compute)
        self.codes = self._compile_segments(recompute, precision)
        self.contributions: dict[int, tuple[str, str, int]] = {}

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
        for slot in self.optimizer.slots:
            for path, unit in self.units.items():
                slots[path].append(declare(f"opt.{slot}", unit, unit.opt))
        return leaves, params, slots

    def _batch(self) -> tuple[list[Leaf], list[list[int]]]:
        """Every batch key of every microbatch; the microbatches of a key are views of one tensor."""
        leaves: list[Leaf] = []
        by_microbatch: list[list[int]] = [[] for _ in range(self.num_microbatches)]
        for key, x in self.batch.items():
            spec, storage = self.strategy.compute_spec(self.model.batch_axes[key], self.mesh), self.writer.storage()
            for m, values in enumerate(by_microbatch):
                leaves.append(self.writer.leaf(f"{key}.{m}", x, spec, storage))
                values.append(leaves[-1].value)
        assert all(local_shape(leaf.shape, leaf.spec, self.mesh) == self.writer.values[leaf.value].shape for leaf in leaves)
        return leaves, by_microbatch

    def _compile_segments(self, recompute: RecomputePolicy, precision: Precision) -> list[SegmentCode]:
        """One compilation for each kind: equal functions on equal values are one."""
        context = self.writer.global_results(self.context_code)
        codes: list[SegmentCode] = []
        done: dict[Any, SegmentCode] = {}
        x: Any = None
        x_specs: list[P] = []
        for segment in self.segments:
            units = [self.units[path] for path in segment.paths]
            grad_dtypes = [precision.grad_dtype(leaf.dtype) for unit in units for _, leaf in unit.leaves]
            traced = trace_segment(segment, [self._in_use(unit) for unit in units], x, context, grad_dtypes)
            specs = [spec for unit in units for spec in unit.compute]
            out_specs = self._out_specs(segment, len(traced.x_out))
            key = (id(traced), tuple(specs), tuple(x_specs), tuple(out_specs))
            if key not in done:
                name = segment.name.split(".")[0]
                context_specs = self.context_code.out_specs
                done[key] = compile_segment(
                    name, traced, self.mesh, self.strategy, specs, x_specs, context_specs, out_specs, recompute
                )
            codes.append(done[key])
            x, x_specs = tree.unflatten(traced.x_structure, traced.x_out) if traced.x_out else None, out_specs
        return codes

    def _in_use(self, unit: Unit) -> Any:
        """The subtree of a unit without data, in the dtypes in which it is used."""
        structure = tree.flatten(tree.get(self.model.abstract_params, unit.path))[1]
        return tree.unflatten(
            structure, [like(leaf, dtype) for (_, leaf), dtype in zip(unit.leaves, unit.compute_dtypes, strict=True)]
        )

    def _out_specs(self, segment: Segment, num_leaves: int) -> list[P]:
        axes = tree.leaves(
            segment.out_axes, is_leaf=lambda a: isinstance(a, tuple) and all(b is None or isinstance(b, str) for b in a)
        )
        return [self.strategy.compute_spec(a, self.mesh) for a in axes] if num_leaves else []

    def write(self, prefetch_bytes: int, info: dict[str, Any]) -> Program:
        """All instructions in order."""
        total, cotangent = self._weights()
        losses: list[int] = []
        for m in range(self.num_microbatches):
            losses += self._microbatch(m, cotangent)
        metrics = [*self._finish(losses, cotangent), self.writer.metric("weight", total)]
        finished = {path: self.gradients.total(unit) for path, unit in self.units.items()}
        lr, step = (leaf.value for leaf in self.scalars)
        norm, new = write_update(
            self.writer, self.optimizer, list(self.units.values()), self.params, finished, self.slots, lr, step
        )
        metrics.append(self.writer.metric("grad_norm", norm))
        state_out = [Leaf(leaf.path, new[leaf.path], leaf.shape, leaf.dtype, leaf.spec) for leaf in self.state_in]
        steps = hoist_gathers(self.writer.instructions, self.writer.values, prefetch_bytes)
        kept = {leaf.value for leaf in (*state_out, *metrics, *self.batch_leaves, *self.scalars)}
        return Program(
            mesh=self.mesh,
            values=self.writer.values,
            kinds=self.writer.kinds,
            instructions=insert_frees(steps, kept),
            state_in=self.state_in,
            state_out=state_out,
            batch=self.batch_leaves,
            scalars=self.scalars,
            metrics=metrics,
            num_microbatches=self.num_microbatches,
            contributions=self.contributions,
            gradients={p: v for path, unit in self.units.items() for p, v in zip(unit.paths, finished[path], strict=True)},
            info=info | {"fallbacks": sorted({op for code in self.writer.codes.values() for op in code.fallbacks})},
        )

    def _weights(self) -> tuple[int, int]:
        """The total weight of the batch, and its reciprocal: the cotangent of every loss."""
        total: int | None = None
        for m, inputs in enumerate(self.batch_values):
            (weight,) = self.writer.emit("weight", self.weight_code, inputs, [f"weight.mb{m}"], "", m)
            total = weight if total is None else self.writer.add([total], [weight], ["weight"], "", m)[0]
        assert total is not None
        code = self.writer.function(
            "total", _with_reciprocal, tuple(self.writer.globals([total])), self.writer.specs([total]), [P(), P()]
        )
        total, cotangent = self.writer.emit("weight", code, [total], ["total", "cotangent"])
        return total, cotangent

    def _microbatch(self, m: int, cotangent: int) -> list[int]:
        """Forward and backward of one microbatch; returns its losses."""
        names = [f"{path}.mb{m}" for path in tree.paths(self.writer.global_results(self.context_code))]
        context = self.writer.emit("context", self.context_code, self.batch_values[m], names, "", m)
        x: list[int] = []
        losses: list[int] = []
        saved: list[_Saved] = []
        for index, (segment, code) in enumerate(zip(self.segments, self.codes, strict=True)):
            operands = [*self.gathers.parameters(index, m), *x, *context]
            num_x, loss_names = len(code.traced.x_out), code.traced.losses
            names = [*[f"x{index + 1}.{m}"] * num_x, *(f"{name}.{index}.{m}" for name in loss_names)]
            names += [f"r{index}.{m}.{i}" for i in range(code.num_kept)]
            out = self.writer.emit("forward", code.forward, operands, names, segment.name, m)
            saved.append(_Saved(x, out[num_x + len(loss_names) :]))
            x, losses = out[:num_x], [*losses, *out[num_x : num_x + len(loss_names)]]
            self.gathers.drop(index, backward=False)
        self._backward(m, saved, context, cotangent)
        return losses

    def _backward(self, m: int, saved: list[_Saved], context: list[int], cotangent: int) -> None:
        dx: list[int] = []
        for index in reversed(range(len(self.segments))):
            segment, code, before = self.segments[index], self.codes[index], saved[index]
            primals = [*self.gathers.parameters(index, m, code.reads), *before.x, *context]
            operands = [*(primals[i] for i in code.reads), *before.kept, *dx, *[cotangent] * len(code.traced.losses)]
            units = [self.units[path] for path in segment.paths]
            paths = [path for unit in units for path in unit.paths]
            names = [*(f"d {path}.mb{m}" for path in paths), *[f"dx{index}.{m}"] * len(before.x)]
            out = self.writer.emit("backward", code.backward, operands, names, segment.name, m)
            grads, dx = out[: len(paths)], out[len(paths) :]
            self.contributions |= {v: (path, segment.name, m) for v, path in zip(grads, paths, strict=True)}
            for unit in units:
                self.gradients.take(segment, index, unit, grads[: len(unit.leaves)], m)
                grads = grads[len(unit.leaves) :]
            self.gathers.drop(index, backward=True)

    def _finish(self, losses: list[int], cotangent: int) -> list[Leaf]:
        """The mean loss of the batch and each microbatch's part of it."""
        count = self.num_microbatches

        def finish(losses: list[Tensor], cotangent: Tensor) -> tuple[Tensor, Tensor]:
            parts = torch.stack(losses).reshape(count, -1).sum(1) * cotangent
            return parts.sum(), parts

        args = (self.writer.globals(losses), *self.writer.globals([cotangent]))
        code = self.writer.function("finish", finish, args, self.writer.specs([*losses, cotangent]), [P(), P()])
        loss, parts = self.writer.emit("finish", code, [*losses, cotangent], ["loss", "microbatch_losses"])
        return [self.writer.metric("loss", loss), self.writer.metric("microbatch_losses", parts)]
