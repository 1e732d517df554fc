"""Runs: the three parts of a traced model (up to its layers, one layer, what follows) and what every layer is called with.

The model of transformers is run as it is. Its layers are replaced by functions that note with what they are called and hand x on.
So no name of a model's own is needed, only that its layers follow one another.
"""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpar.models.traced._mode import Weight, Weights
from mpar.models.traced._reading import Reading, reading
from mpar.models.traced._skeleton import Skeleton
from mpar.torch_private import pytree

__all__ = ["Call", "embed", "head", "layer", "layer_calls"]

_LOCK = threading.RLock()
"""A skeleton is one object, whose layers are replaced for a moment."""


@dataclass(frozen=True)
class Call:
    """With what a layer is called behind x. leaves: for each leaf of (args, kwargs) a key of the context, or what is given."""

    structure: Any
    leaves: tuple[Any, ...]

    def arguments(self, context: Mapping[str, Tensor]) -> tuple[tuple, dict]:
        """The arguments behind x, with the tensors of `context`."""
        values = [context[leaf.key] if isinstance(leaf, Key) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(values, self.structure)


@dataclass(frozen=True)
class Key:
    """Stands in a `Call` for a tensor of the context."""

    key: str


class _ReachedError(Exception):
    """Leaves the run of a model."""


def layer_calls(skeleton: Skeleton, tokens: Tensor, positions: Tensor) -> tuple[list[Call], dict[str, Tensor]]:
    """`(how each layer is called, tensors of the context by their keys)`. Weights are not read: they count as zeros."""
    notes: list[tuple[tuple, dict]] = []

    def note(x: Tensor, *args: object, **kwargs: object) -> object:
        notes.append((args, kwargs))
        if len(notes) == len(skeleton.layers):
            raise _ReachedError
        return _as_layers_do(skeleton, x)

    _run(skeleton, {}, tokens, positions, [note] * len(skeleton.layers))
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

    _run(skeleton, weights, tokens, positions, [note] * len(skeleton.layers))
    return found[0]


def layer(skeleton: Skeleton, index: int, weights: Mapping[str, Weight], x: Tensor, call: Call, found: Reading) -> Tensor:
    """(B, S, D) behind layer `index`. Weights are called as in the layer's module."""
    args, kwargs = call.arguments(found.context)
    given = {name: weight.whole for name, weight in weights.items()}
    with _LOCK, reading(found), Weights(weights):
        out = torch.func.functional_call(skeleton.layers[index], given, (x, *args), kwargs)
    found.gives_tuple = isinstance(out, (tuple, list))
    return out[0] if found.gives_tuple else out


def head(skeleton: Skeleton, weights: Mapping[str, Weight], x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """(B, S, V): logits of what the last layer gives."""
    calls = 0

    def put(given: Tensor, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return _as_layers_do(skeleton, x if calls == 1 else given)

    return _run(skeleton, weights, tokens, positions, [put] * len(skeleton.layers)).logits


def _run(skeleton: Skeleton, weights: Mapping[str, Weight], tokens: Tensor, positions: Tensor, forwards: list) -> Any:
    """Call the whole model; what it returns, or None if a layer has left the run."""
    given = {name: weight.whole for name, weight in weights.items()}
    dtype = next(iter(given.values())).dtype if given else torch.float32
    for name, parameter in skeleton.parameters.items():
        if name not in given and not name.startswith(tuple(f"{layer}." for layer in skeleton.names)):
            given[name] = torch.zeros((), dtype=dtype).expand(parameter.shape)
    known = inspect.signature(skeleton.module.forward).parameters
    options = {"use_cache": False, "position_ids": positions, "return_dict": True}
    if skeleton.masked:  # without a mask transformers would look for packed rows in the values of positions
        options["attention_mask"] = torch.ones_like(tokens)
    options = {key: value for key, value in options.items() if key in known or key == "return_dict"}
    try:
        with _LOCK, skeleton.forwards(forwards), Weights(weights):
            return torch.func.functional_call(skeleton.module, given, (tokens,), options, tie_weights=True)
    except _ReachedError:
        return None


def _as_layers_do(skeleton: Skeleton, x: Tensor) -> Any:
    return (x,) if skeleton.returns_tuple else x
