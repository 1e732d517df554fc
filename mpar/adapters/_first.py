"""First values that depend on the weights: the magnitudes of DoRA, and A, B and the weight itself with PiSSA and OLoRA."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mpar import ops
from mpar.adapters._leaves import AdapterLeaf, letters_of
from mpar.adapters._lora import LoRA
from mpar.adapters._targets import Adapted
from mpar.models import MatrixLeaf, Read

__all__ = ["first_leaf"]


def first_leaf(
    loras: Mapping[str, LoRA],
    adapted: Mapping[str, tuple[Adapted, ...]],
    leaves: Mapping[str, AdapterLeaf],
    init: Callable[[str, Sequence[slice] | None], Tensor],
    path: str,
    slices: Sequence[slice] | None,
    read: Read,
) -> Tensor:
    """The elements within `slices` (None: all) of one leaf of an adapted model.

    loras, adapted: by the name of each adapter. leaves: of all adapters by path. init: gives those that depend on no weight.
    read: gives leaves of the model without adapters.
    """
    if path in leaves:
        leaf = leaves[path]
        lora = loras[path.split(".")[1]]
        if leaf.part == "magnitude":
            return _cut(_norm(read(leaf.leaf.path, None), leaf), slices)
        if lora.init in ("pissa", "olora"):
            a, b = _factors(leaf.adapted, lora.init, read)
            _, rows = _rows(leaf.adapted, leaf.leaf.path, read)
            made = _as_leaf(a if leaf.part == "a" else b, leaf, rows)
            return _cut(made.to(init(path, [slice(0, 0)] * made.ndim).dtype), slices)
        return init(path, slices)
    for name, lora in loras.items():
        changed = [item for item in adapted[name] if any(leaf.path == path for leaf in item.matrix.leaves)]
        if lora.init in ("pissa", "olora") and changed:
            return _cut(_without(changed[0], lora.init, path, read), slices)
    return read(path, slices)


def _cut(x: Tensor, slices: Sequence[slice] | None) -> Tensor:
    return x if slices is None else x[tuple(slices)].contiguous()


def _norm(weight: Tensor, leaf: AdapterLeaf) -> Tensor:
    letters = "".join(letters_of(leaf.leaf).values())
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return ops.einsum(f"{letters},{letters}->{leaf.letters}", wide, wide).sqrt()


def _matrix(weight: Tensor, leaf: MatrixLeaf) -> Tensor:
    """The leaf as (result, given), as torch.nn.Linear has it; in float32 or wider."""
    result, given = ([leaf.dims.index(dim) for dim in leaf.letters(side)] for side in ("result", "given"))
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return wide.permute(*result, *given).flatten(len(result)).flatten(0, len(result) - 1)


def _factors(adapted: Adapted, init: str, read: Read) -> tuple[Tensor, Tensor]:
    """A (rank, given) and B (result, rank) of the stored matrix, that is of all its leaves."""
    matrix = torch.cat([_matrix(read(leaf.path, None), leaf) for leaf in adapted.matrix.leaves])
    if init == "olora":
        q, r = torch.linalg.qr(matrix)
        return r[: adapted.rank], q[:, : adapted.rank]
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    root = (s[: adapted.rank] / adapted.scale).sqrt()
    return root[:, None] * v[: adapted.rank], u[:, : adapted.rank] * root


def _rows(adapted: Adapted, path: str, read: Read) -> tuple[MatrixLeaf, slice]:
    """The leaf at `path`, and which rows of the stored matrix it is."""
    start = 0
    for leaf in adapted.matrix.leaves:
        count = _matrix(read(leaf.path, None), leaf).shape[0]
        if leaf.path == path:
            return leaf, slice(start, start + count)
        start += count
    raise AssertionError(f"{path} is no leaf of {adapted.matrix.name}")


def _without(adapted: Adapted, init: str, path: str, read: Read) -> Tensor:
    """The weight at `path` without what its adapter begins with."""
    leaf, rows = _rows(adapted, path, read)
    a, b = _factors(adapted, init, read)
    weight = read(path, None)
    changed = _matrix(weight, leaf) - adapted.scale * (b[rows] @ a)
    result, given = ([leaf.dims.index(dim) for dim in leaf.letters(side)] for side in ("result", "given"))
    order = (*result, *given)
    sizes = [weight.shape[dim] for dim in order]
    return changed.reshape(sizes).permute([order.index(dim) for dim in range(weight.ndim)]).contiguous().to(weight.dtype)


def _as_leaf(factor: Tensor, leaf: AdapterLeaf, rows: slice) -> Tensor:
    """A, or the rows of B that belong to the leaf, with the dims of the leaf."""
    if leaf.part == "a":
        return factor.reshape(leaf.shape[-1], *leaf.shape[:-1]).movedim(0, -1).contiguous()
    return factor[rows].reshape(*leaf.shape[1:], leaf.shape[0]).movedim(-1, 0).contiguous()
