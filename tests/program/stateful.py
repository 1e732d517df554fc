"""A chain that keeps state of two sorts: a running mean, which is copied over the old one, and rows that are written in place."""

import torch

from mpar import ops, tree
from mpar.chain import Chain, Segment

__all__ = ["BATCHES", "PARAMS", "SHAPE", "Stateful", "expected_results", "meta"]

B, S, D, P = 2, 4, 8, 6
RESIDUAL = ("batch", "seq", "embed")
F64 = torch.float64


def embed(params, x, context, *, training):
    return ops.constrain(context["values"], ("batch", "seq"))[..., None] * params[0], {}


def layer(params, x, context, state, *, training):
    mean_D, pool_BPKH = state
    mean_D = mean_D * 0.5 + x.mean((0, 1)) * 0.5
    pool_BPKH = ops.write_rows(pool_BPKH, x.unflatten(-1, (4, 2)), context["places"])
    y = x + ops.einsum("bsd,de->bse", x, params[0]) + mean_D + pool_BPKH.sum(1).flatten(1)[:, None]
    return ops.constrain(y, RESIDUAL), (mean_D, pool_BPKH), {}


def head(params, x, context, *, training):
    return {"y": x * params[0], "total": x.sum((1, 2))}, {}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=F64, device="meta")


class Stateful(Chain):
    """Two layers that keep state, between an embedding and a head."""

    segments = (
        Segment("embed", embed, ("embed",), RESIDUAL),
        Segment("layers.0", layer, ("layers.0",), RESIDUAL, state=("mean.0", "pool.0")),
        Segment("layers.1", layer, ("layers.1",), RESIDUAL, state=("mean.1", "pool.1")),
        Segment("head", head, ("head",), {"y": ("batch", "seq", None), "total": ("batch",)}),
    )
    abstract_params = {"embed": meta(D), "layers": [meta(D, D), meta(D, D)], "head": meta(D)}  # noqa: RUF012
    param_axes = {"embed": ("embed",), "layers": [("embed", "mlp")] * 2, "head": ("embed",)}  # noqa: RUF012
    abstract_state = {"mean": [meta(D)] * 2, "pool": [meta(B, P, 4, 2)] * 2}  # noqa: RUF012
    state_axes = {"mean": [("embed",)] * 2, "pool": [("batch", None, "kv_heads", "head")] * 2}  # noqa: RUF012
    batch_axes = {"values": ("batch", "seq"), "places": ("batch", "seq")}  # noqa: RUF012

    def context(self, batch, row_length=None):
        return dict(batch)

    def weight(self, batch):
        return torch.ones(())


_generator = torch.Generator().manual_seed(0)
SHAPE = {"values": ((B, S), F64), "places": ((B, S), torch.int64)}
PARAMS = tree.map_leaves(lambda x: torch.randn(x.shape, generator=_generator, dtype=F64), Stateful.abstract_params)
BATCHES = [
    {
        "values": torch.randn(B, S, generator=_generator, dtype=F64),
        "places": torch.stack([torch.randperm(P, generator=_generator)[:S] for _ in range(B)]),
    }
    for _ in range(3)
]


def expected_results() -> list[dict[str, torch.Tensor]]:
    """What the steps give, in plain torch."""
    means, pools = [torch.zeros(D, dtype=F64)] * 2, [torch.zeros(B, P, 4, 2, dtype=F64) for _ in range(2)]
    results = []
    for batch in BATCHES:
        x = batch["values"][..., None] * PARAMS["embed"]
        for i in range(2):
            means[i] = means[i] * 0.5 + x.mean((0, 1)) * 0.5
            for row in range(B):
                pools[i][row, batch["places"][row]] = x[row].unflatten(-1, (4, 2))
            x = x + x @ PARAMS["layers"][i] + means[i] + pools[i].sum(1).flatten(1)[:, None]
        results.append({"y": x * PARAMS["head"], "total": x.sum((1, 2))})
    return results
