"""Merge of two partial results of attention, as a ring does each time that it has received keys and values."""

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy
from mpar.kernels import implementation
from tools.kernel_shapes import MERGE

__all__ = ["ROWS"]

CHECKED = 256


def merge(setting: Setting, *, S: int, N: int, H: int) -> Built:
    """Two outputs and their log-sum-exps are merged into one of each."""
    parts = [x for _ in range(2) for x in (setting.normal(1, S, N, H), setting.normal(1, S, N, dtype=torch.float32))]
    compiled = setting.compiled(_merge)
    peers: dict[str, Variant | str] = {
        "eager": Variant(lambda: _merge(*parts), _first),
        "torch.compile": Variant(lambda: compiled(*parts), _first),
    }
    ours = Variant(lambda: implementation("merge_attention", "triton")(*parts), _first)
    small = [x[:, :CHECKED].double() for x in parts]
    return Built(ours, peers, lambda: _merge(*small), 3 * (parts[0].nbytes + parts[1].nbytes))


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    shares = [(x - lse).exp()[..., None] for x in (lse_a, lse_b)]
    return (shares[0] * out_a + shares[1] * out_b).to(out_a.dtype), lse


def _first(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [x[:, :CHECKED] for x in pair]


ROWS = [Row(8, "attention merge", merge, MERGE, [of_copy(0.85)])]
