"""The batch of a step: the shapes of its pieces, and how the positions of a sequence are dealt out to the ranks that share it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar.arrange import check_sequence, num_order_parts
from mpar.chain import Chain
from mpar.compiler.build._options import BatchShape
from mpar.errors import ConfigError, ShapeError
from mpar.mesh import Mesh
from mpar.strategy import Strategy

__all__ = ["length_of", "microbatch_shape", "order_sequence", "piece_values"]


def piece_values(model: Chain, batch_shape: BatchShape, num_microbatches: int, num_slices: int) -> dict[str, Tensor]:
    """A global tensor without data for each entry of the batch, in the shape of one slice of a microbatch.

    Raises ConfigError or ShapeError if the model does not read an entry, or if the batch cannot be cut into so many parts.
    """
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
    if num_microbatches > 1 and model.forbids_microbatches is not None:
        raise ConfigError(f"cannot cut a step into {num_microbatches} microbatches: {model.forbids_microbatches}")
    lengths = {key: shape[1] for key, shape in shapes.items()}
    if not isinstance(num_slices, int) or num_slices < 1 or any(n % num_slices for n in lengths.values()):
        lengths_text = " and ".join(f"{n:,}" for n in sorted(set(lengths.values())))
        raise ShapeError(
            f"cannot cut rows of {lengths_text} positions into {num_slices} equal slices.\n"
            f"Use a num_slices that divides {lengths_text} (schedule.num_slices in a configuration); 1 leaves rows whole."
        )
    if num_slices > 1 and model.forbids_slices is not None:
        raise ConfigError(
            f"cannot cut the rows of this model into {num_slices} slices: {model.forbids_slices}\n"
            "num_slices=1 (schedule.num_slices in a configuration) leaves rows whole."
        )
    return {
        key: torch.empty((shape[0] // num_microbatches, shape[1] // num_slices), dtype=dtype, device="meta")
        for key, (shape, dtype) in batch_shape.items()
    }


def order_sequence(model: Chain, strategy: Strategy, mesh: Mesh, batch: dict[str, Tensor], num_slices: int) -> int:
    """The number of parts into which sequences are cut to deal them out to the ranks that share them; 1 if they stay whole.

    If ranks share sequences, or rows are cut into slices, `batch` gets the entry "order": the place in the row of each position.
    Without it a slice would not know where in the row it begins. It is not added for a model that reads no such entry.
    """
    lengths = {x.shape[1] for key, x in batch.items() if model.batch_axes[key][1] is not None}
    for length in lengths:
        check_sequence(strategy, mesh, length, dealt="order" in model.batch_axes, num_slices=num_slices)
    shared = mesh.axis_size(strategy.compute.get("seq", ())) > 1
    if "order" not in model.batch_axes or (not shared and num_slices == 1):
        return 1
    (length,) = lengths
    batch["order"] = torch.empty(length, dtype=torch.int64, device="meta")
    return num_order_parts(strategy, mesh) if shared else 1


def microbatch_shape(x: Tensor, num_slices: int) -> tuple[int, int]:
    """The shape that a batch entry has in a whole microbatch; `x` is the entry of one slice."""
    num_rows, length = x.shape
    return num_rows, num_slices * length


def length_of(batch: Mapping[str, Tensor]) -> int:
    """The number of positions that the rows of a batch have."""
    return next(x.shape[1] for x in batch.values() if x.ndim > 1)
