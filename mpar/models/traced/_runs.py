"""Runs: the three parts of a traced model (up to its layers, one layer, what follows) and what every layer is called with.

The model of transformers is run as it is. Its layers are replaced by functions that note with what they are called and hand x on.
So no name of a model's own is needed, only that its layers follow one another.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.models.traced._mode import Weight, Weights
from mpar.models.traced._reading import Reading, reading
from mpar.models.traced._skeleton import Skeleton
from mpar.torch_private import pytree

__all__ = ["Call", "HasLogits", "embed", "head", "layer", "layer_calls", "logits_of"]

_LOCK = threading.RLock()
"""A skeleton is one object, whose layers are replaced for a moment."""


@dataclass(frozen=True)
class Call:
    """With what a layer is called behind x. leaves: for each leaf of (args, kwargs) a key of the context, or what is given."""

    structure: Any
    leaves: tuple[Any, ...]

    def arguments(self, context: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> tuple[tuple, dict]:
        """The arguments behind x, with the tensors of `context`; with `dtype`, those that are floating are converted to it."""
        values = [context[leaf.key] if isinstance(leaf, Key) else leaf for leaf in self.leaves]
        if dtype is not None:
            values = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in values]
        return pytree.tree_unflatten(values, self.structure)


@dataclass(frozen=True)
class Key:
    """Stands in a `Call` for a tensor of the context."""

    key: str


class _ReachedError(Exception):
    """Leaves the run of a model."""


def layer_calls(
    skeleton: Skeleton, tokens: Tensor, positions: Tensor, dtype: torch.dtype, count: int | None = None
) -> tuple[list[Call], dict[str, Tensor]]:
    """`(how each layer is called, or the first `count` of them, tensors of the context by their keys)`.

    Weights are not read: they count as zeros of `dtype`.
    """
    notes: list[tuple[tuple, dict]] = []
    shapes: list[tuple[int, ...]] = []
    last = len(skeleton.layers) if count is None else count

    def note(*args: object, **kwargs: object) -> object:
        x, *args_behind = args or (None,)
        if not isinstance(x, Tensor):
            raise ConfigError(f"{skeleton.names[len(notes)]} is not called with x, a tensor, as its first argument")
        shapes.append(tuple(x.shape))
        if shapes[-1] != shapes[0]:
            raise ConfigError(
                f"its layers read x of unlike shapes: {skeleton.names[0]} {shapes[0]}, {skeleton.names[len(notes)]} {shapes[-1]}"
            )
        notes.append((tuple(args_behind), kwargs))
        if len(notes) == last:
            raise _ReachedError
        return _as_layers_do(skeleton, x)

    _run(skeleton, {}, tokens, positions, [note] * len(skeleton.layers), dtype)
    keys: dict[int, str] = {}
    context: dict[str, Tensor] = {}
    calls = []
    for noted in notes:
        leaves, structure = pytree.tree_flatten(noted)
        entries = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                key = keys.setdefault(id(leaf), f"call.{len(keys)}")
                context[key] = leaf
                leaf = Key(key)
            elif hasattr(leaf, "get_seq_length"):  # a cache of keys, which some models make without being asked
                leaf = None
            entries.append(leaf)
        calls.append(Call(structure, tuple(entries)))
    return calls, context


def embed(skeleton: Skeleton, weights: Mapping[str, Weight], tokens: Tensor, positions: Tensor) -> Tensor:
    """(B, S, D): what the first layer reads."""
    found: list[Tensor] = []

    def note(x: Tensor, *args: object, **kwargs: object) -> object:
        found.append(x)
        raise _ReachedError

    _run(skeleton, weights, tokens, positions, [note] * len(skeleton.layers), _dtype(weights))
    return found[0]


def layer(skeleton: Skeleton, index: int, weights: Mapping[str, Weight], x: Tensor, call: Call, found: Reading) -> Tensor:
    """(B, S, D) behind layer `index`. Weights are called as in the layer's module."""
    # attention of a model's own takes masks and biases of positions in the dtype of its scores only
    args, kwargs = call.arguments(found.context, x.dtype if skeleton.masked else None)
    given = {name: weight.whole for name, weight in weights.items()}
    with _LOCK, reading(found), Weights(weights):
        out = torch.func.functional_call(skeleton.layers[index], given, (x, *args), kwargs)
    if not isinstance(out, (tuple, list)):
        return out
    found.behind = len(out) - 1
    return out[0]


def head(skeleton: Skeleton, weights: Mapping[str, Weight], x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """(B, S, V): logits of what the last layer gives."""
    calls = 0

    def put(given: Tensor, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return _as_layers_do(skeleton, x if calls == 1 else given)

    return logits_of(_run(skeleton, weights, tokens, positions, [put] * len(skeleton.layers), _dtype(weights)))


class HasLogits(Protocol):
    """What a model of transformers returns."""

    logits: Tensor


def logits_of(returned: Tensor | tuple[Tensor, ...] | HasLogits) -> Tensor:
    """The logits among what a model returns: alone, first in a tuple, or an attribute."""
    return returned if isinstance(returned, Tensor) else returned[0] if isinstance(returned, tuple) else returned.logits


def _dtype(weights: Mapping[str, Weight]) -> torch.dtype:
    return next(iter(weights.values())).whole.dtype if weights else torch.float32


def _run(
    skeleton: Skeleton,
    weights: Mapping[str, Weight],
    tokens: Tensor,
    positions: Tensor,
    forwards: Sequence[Callable[..., object]],
    dtype: torch.dtype,
) -> Any:
    """Call the whole model; what it returns, or None if a layer has left the run."""
    given = {name: weight.whole for name, weight in weights.items()}
    for name, parameter in skeleton.parameters.items():
        if name not in given and not name.startswith(tuple(f"{layer}." for layer in skeleton.names)):
            given[name] = torch.zeros((), dtype=dtype).expand(parameter.shape)
    options = dict(skeleton.options)
    if skeleton.positions is not None:
        options[skeleton.positions] = positions
    if skeleton.masked:  # without a mask transformers would look for packed rows in the values of positions
        options["attention_mask"] = torch.ones_like(tokens)
    try:
        with _LOCK, skeleton.forwards(forwards), Weights(weights):
            return torch.func.functional_call(skeleton.module, given, (tokens,), options, tie_weights=True)
    except _ReachedError:
        return None


def _as_layers_do(skeleton: Skeleton, x: Tensor) -> Any:
    return x if skeleton.behind is None else (x, *[None] * skeleton.behind)
