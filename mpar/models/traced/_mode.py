"""Mode: while a traced model runs, some functions of torch become primitives, and products are marked for the strategy.

A product whose result has a dim that tensor parallelism shards reads all positions; one that sums over such a dim gives a part of
the residual stream (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3; Korthikanti et al. 2022, arXiv:2205.05198, sec. 4).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.models.traced._attention import dot_product_attention
from mpar.ops import StandIn
from mpar.torch_private import TorchFunctionMode

__all__ = ["Weight", "Weights"]

SPLIT = frozenset({"heads", "kv_heads", "mlp", "vocab"})
"""Logical axes that tensor parallelism shards."""
_BLOCK, _RESIDUAL = ("batch", "seq", "embed"), ("batch", "residual_seq", "embed")


class Weight:
    """A parameter as the module reads it.

    parts: the leaves that it is made of, shaped as they are stored, along its dim `joined`; of a frozen weight with an adapter,
           objects that stand for them. whole: the tensor that they are.
    axes:  for each dim of the parameter a logical axis that is in it; of parts, that of the first.
    cuts:  filled by runs: along which dim, and into which sizes, what is computed with it is cut: (dim, sizes).
    """

    def __init__(self, parts: Sequence[Tensor], axes: Axes, joined: int | None = None) -> None:
        self.parts, self.axes, self.joined = tuple(parts), axes, joined
        parts = [part.tensor() if isinstance(part, StandIn) else part for part in self.parts]
        self.whole = parts[0] if joined is None else torch.cat(parts, joined)
        self.cuts: set[tuple[int, tuple[int, ...]]] = set()


class Weights(TorchFunctionMode):
    """Replaces functions of torch that read these weights, and gates of feed-forward layers."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__()
        self._of_tensor = {id(weight.whole): weight for weight in weights.values()}
        self._stand_ins = {id(weight.whole): part for weight in weights.values() for part in _alone(weight)}
        self._keep = weights
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}  # by id of what products read: it, and it with all its positions
        self._gates: dict[int, tuple[Tensor, Tensor, Any]] = {}  # by id of a result: the result, what it is of, the fused op
        self._products: dict[int, tuple[Tensor, list[Tensor], list[Weight]]] = {}  # by id: a product, its parts, what made it

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return dot_product_attention(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(func, *args, **kwargs)
        if func in (F.layer_norm, F.rms_norm):
            return _norm(func, *args, **kwargs)
        if func in (torch.chunk, Tensor.chunk, torch.split, Tensor.split) and id(args[0]) in self._products | self._of_tensor:
            return self._cut(func, *args, **kwargs)
        if func in (F.silu, F.gelu):
            return self._gate(func, args, kwargs)
        if func in (torch.mul, Tensor.mul, Tensor.__mul__) and len(args) == 2 and not kwargs:
            return self._product(func, *args)
        args = tuple(self._stand_ins.get(id(x), x) for x in args)
        if any(isinstance(x, StandIn) for x in args):
            return StandIn.__torch_function__(func, (), args, kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        known = self._of_tensor.get(id(weight))
        if known is None or input.ndim != 3:
            return F.linear(input, weight, bias)
        gives, sums = (axis in SPLIT for axis in known.axes)
        if gives:  # products of one input share its gather, and one reduction in the backward
            _, input = self._blocks.setdefault(id(input), (input, ops.constrain(input, _BLOCK)))
        parts = [F.linear(input, part) for part in known.parts]
        made_with, biases = [known], self._of_tensor.get(id(bias))
        if sums:
            parts = [ops.constrain(part, _RESIDUAL) for part in parts]
        if biases is not None and len(biases.parts) == len(parts):
            parts, made_with = [part + added for part, added in zip(parts, biases.parts, strict=True)], [known, biases]
            bias = None
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if bias is not None:
            return y + bias
        self._products[id(y)] = (y, parts, made_with)
        return y

    def _cut(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Pieces of a weight, or of a product with one: its leaves, where they are cut in the same way."""
        pieces = func(x, sizes, dim)
        product = self._products.get(id(x))
        cut = tuple(piece.shape[dim] for piece in pieces)
        if product is None:
            weights, parts, along = [self._of_tensor[id(x)]], list(self._of_tensor[id(x)].parts), dim % x.ndim
        else:
            (_, parts, weights), along = product, 0
            if dim % x.ndim != x.ndim - 1:
                return pieces
        for weight in weights:
            weight.cuts.add((along, cut))
        return tuple(parts) if tuple(part.shape[dim] for part in parts) == cut else pieces

    def _embedding(self, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if id(weight) not in self._of_tensor or kwargs.get("max_norm") is not None:
            return func(input, weight, *args, **kwargs)
        y = ops.embedding(input, self._of_tensor[id(weight)].parts[0])
        axes: Axes = ("batch" if input.shape[0] > 1 else None, *_RESIDUAL[1:])
        return ops.constrain(y, axes) if y.ndim == 3 else y

    def _gate(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        result = func(*args, **kwargs)
        if func is F.silu and len(args) == 1:
            self._gates[id(result)] = (result, args[0], ops.swiglu)
        elif func is F.gelu and len(args) == 1:
            approximate = kwargs.get("approximate", "none")
            self._gates[id(result)] = (result, args[0], lambda gate, up: ops.geglu(gate, up, approximate))
        return result

    def _product(self, func: Any, a: Any, b: Any) -> Tensor:
        """A gated product as one op. The element-wise op alone is then not read, and is erased."""
        for gate, other in ((a, b), (b, a)):
            noted = self._gates.get(id(gate))
            if noted is not None and isinstance(other, Tensor) and (other.shape, other.dtype) == (gate.shape, gate.dtype):
                return noted[2](noted[1], other)
        return func(a, b)


def _alone(weight: Weight) -> list[StandIn]:
    """What stands for all of a weight, if anything does."""
    return [part for part in weight.parts if isinstance(part, StandIn)] if weight.joined is None else []


def _norm(func: Any, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float | None = None) -> Tensor:
    """A norm of the last dim; `F.rms_norm` has no bias, and its eps stands in the place of one."""
    if func is F.rms_norm and bias is not None:
        bias, eps = None, bias
    if len(shape) != 1:
        return func(x, shape, weight, eps=eps) if func is F.rms_norm else func(x, shape, weight, bias, eps or 1e-5)
    if func is F.rms_norm:
        return ops.rms_norm(x, weight, eps=torch.finfo(x.dtype).eps if eps is None else eps)
    return ops.layer_norm(x, weight, bias, eps=1e-5 if eps is None else eps)
