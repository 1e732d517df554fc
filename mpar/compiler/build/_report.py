"""Report: the losses and metrics that a step returns. Losses of segments become means over the batch, metrics are added up."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._reported import Reported
from mpar.compiler.build._writer import Writer
from mpar.ir import Leaf
from mpar.ops import constrain
from mpar.spec import P

__all__ = ["widest", "write_losses", "write_metrics"]


def write_losses(writer: Writer, blueprint: Blueprint, reported: Reported, cotangent: int) -> list[Leaf]:
    """Write the mean loss of the batch, how much of it each microbatch gives, and the mean of every other loss by name.

    cotangent: the value that holds one over the weight of the batch.
    """
    codes = [slices[0] for slices in blueprint.codes]  # every slice gives the same losses
    num_microbatches, num_slices = blueprint.options.num_microbatches, blueprint.options.num_slices
    entries = [(i, n) for i, code in enumerate(codes) for n in range(len(code.traced.losses))]
    order = [(piece, i, n) for piece in blueprint.all_pieces for i, n in entries]
    given = [entry for entry in order if entry[:2] in reported.losses]
    dtype = widest([codes[i].forward.out_values[len(codes[i].traced.x_out) + n].dtype for i, n in entries])
    values = [reported.losses[piece, i][n] for piece, i, n in given]
    vector = writer.spread("all losses", values, [[entry] for entry in given], order, dtype, op="finish")
    columns = [codes[i].traced.losses[n] for i, n in entries] * num_slices
    loss_names = sorted(set(columns), key=lambda name: (name != "loss", name))

    def finish(losses: Tensor, cotangent: Tensor) -> list[Tensor]:
        # every rank gets all losses and adds them in the same order; if each position along pp added up its losses first, the
        # rounding would depend on how microbatches and stages are divided among positions
        table, out = constrain(losses, P()).reshape(num_microbatches, -1), []
        for loss_name in loss_names:
            chosen = [i for i, name in enumerate(columns) if name == loss_name]
            by_microbatch = (table if len(loss_names) == 1 else torch.stack([table[:, i] for i in chosen], 1)).sum(1) * cotangent
            out += [by_microbatch.sum(), *([by_microbatch] if loss_name == "loss" else [])]
        return out

    operands, names = [vector, cotangent], ["loss", "microbatch_losses", *loss_names[1:]]
    code = writer.functions.compile(
        "finish", finish, writer.values.globals(operands), writer.values.specs(operands), [P()] * len(names)
    )
    return [writer.metric(name, value) for name, value in zip(names, writer.emit("finish", code, operands, names), strict=True)]


def write_metrics(writer: Writer, blueprint: Blueprint, reported: Reported) -> dict[str, int]:
    """Write the metrics that segments report besides losses; returns their values by `<segment>.<metric>`.

    Every position along pp gets all of them.
    """
    codes = [slices[0] for slices in blueprint.codes]  # every slice reports the same
    shapes = {
        (index, n): (f"{blueprint.segments[index].name}.{name}", code.forward.out_values[len(code.traced.x_out) + n])
        for index, code in enumerate(codes)
        for n, name in enumerate(code.traced.metrics, len(code.traced.losses))
    }
    if not shapes:
        return {}
    order = [(*key, i) for key, (_, x) in shapes.items() for i in range(x.numel())]
    given = {(i, n): v for i, sums in reported.sums.items() for n, v in enumerate(sums, len(codes[i].traced.losses))}
    places = [[(*key, i) for i in range(shapes[key][1].numel())] for key in given]
    vector = writer.spread("all metrics", list(given.values()), places, order, torch.float64, op="metrics")

    def cut(vector: Tensor) -> list[Tensor]:
        flat_metrics = constrain(vector, P()).split([x.numel() for _, x in shapes.values()])
        return [flat.reshape(x.shape).to(x.dtype) for flat, (_, x) in zip(flat_metrics, shapes.values(), strict=True)]

    names = [name for name, _ in shapes.values()]
    args, specs = tuple(writer.values.globals([vector])), writer.values.specs([vector])
    code = writer.functions.compile("metrics", cut, args, specs, [P()] * len(names))
    return dict(zip(names, writer.emit("metrics", code, [vector], names), strict=True))


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype, at least float32, that can hold the values of all of these."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
