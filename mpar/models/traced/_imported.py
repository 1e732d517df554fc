"""Imported: all that is known of a traced model after its parts have run once without data: calls, layouts, equal layers."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import ConfigError, MparError
from mpar.models.traced import _runs as runs
from mpar.models.traced._layout import Layout, LeafLayout, layouts
from mpar.models.traced._mode import Weight
from mpar.models.traced._modules import ModuleSource
from mpar.models.traced._reading import Reading
from mpar.models.traced._skeleton import Skeleton, Source
from mpar.ops import PRIMITIVES
from mpar.sharding import LogicalGraph, trace
from mpar.torch_private import DataDependentOutputException, FakeTensorMode
from mpar.user_code import place_of

__all__ = ["Imported", "imported"]

_Cut = tuple[int, tuple[int, ...]]
_BATCH, _SEQ = 3, 11  # sizes that occur nowhere else


@dataclass(frozen=True)
class Imported:
    """A traced model.

    calls:    how each layer is called. kinds: for each layer the index of the first one that computes the same.
    embed, head: the names of the parameters that are read before and behind the layers; the latter with those that nothing reads.
    layouts:  for each stored parameter how it is cut into leaves.
    pairs:    for each layer a token's multiplications with each other token of a row: 2 n h for n heads of h.
    windows:  for each layer the windows of its calls of attention; None is a call that sees the whole row.
    kv_heads: for each layer how many heads of keys each of these calls has.
    vocab_size: the number of tokens.
    """

    skeleton: Skeleton
    calls: tuple[runs.Call, ...]
    kinds: tuple[int, ...]
    embed: tuple[str, ...]
    head: tuple[str, ...]
    layouts: Mapping[str, Layout]
    pairs: tuple[int, ...]
    windows: tuple[tuple[int | None, ...], ...]
    kv_heads: tuple[tuple[int, ...], ...]
    vocab_size: int

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.calls)

    def layer_names(self, index: int) -> list[str]:
        """The names of the parameters of a layer, within it."""
        return [name for name, _ in self.skeleton.layers[index].named_parameters()]

    def weights(self, names: Mapping[str, str], leaves: Mapping[str, Tensor | Mapping[str, Tensor]]) -> dict[str, Weight]:
        """What runs read. names: for the name that a run has for a parameter its stored name; leaves: by the name of the run."""
        buffers = self.skeleton.buffers
        given = {name: tree.map_leaves(Tensor.detach, x) if names[name] in buffers else x for name, x in leaves.items()}
        return {name: self._weight(self.layouts[stored], given[name]) for name, stored in names.items()}

    def _weight(self, layout: Layout, leaf: Tensor | Mapping[str, Tensor]) -> Weight:
        given = list(leaf.values()) if isinstance(leaf, Mapping) else [leaf]
        parts = [x.reshape(like.stored_shape) for x, like in zip(given, layout.leaves, strict=True)]
        return Weight(parts, layout.axes, layout.joined)


@functools.lru_cache(maxsize=16)
def imported(source: Source | ModuleSource) -> Imported:
    """What tracing finds of a model of transformers, or of a module. Raises ConfigError if it cannot be traced."""
    found = source.skeleton()
    try:
        return _imported(found)
    except MparError as error:
        raise ConfigError(f"cannot trace {source.label(found)}: {error}") from error
    except DataDependentOutputException as error:
        raise ConfigError(
            f"cannot trace {source.label(found)}: {error.func}{place_of(error)} makes a Python value or a shape from the data of "
            "a tensor, as `if x.sum() > 0` does.\nUse torch.where and fixed shapes instead."
        ) from error
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"cannot trace {source.label(found)}: {type(error).__name__}{place_of(error)}: {said}") from error


def _imported(found: Skeleton) -> Imported:
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, positions = torch.zeros(_BATCH, _SEQ, dtype=torch.int64), torch.arange(_SEQ)[None]
        found = _probed(found, tokens, positions)
        calls, context = runs.layer_calls(found, tokens, positions, torch.float32)
    if len(calls) != len(found.layers):
        raise ConfigError(f"it has {len(found.layers)} layers and runs {len(calls)} of them")
    context = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in context.items()}
    signatures = [_signature(layer, call) for layer, call in zip(found.layers, calls, strict=True)]
    kinds = tuple(signatures.index(signature) for signature in signatures)
    known: dict[str, Layout] = {}
    attends: dict[int, list[fx.Node]] = {}
    for index in sorted(set(kinds)):
        logical, cuts = _trace_layer(found, index, calls[index], context, {})
        if cuts:
            logical, _ = _trace_layer(found, index, calls[index], context, cuts)
        attends[index] = [node for node in logical.graph.nodes if node.target == PRIMITIVES["attention"].op]
        names = {path: path.removeprefix("0.") for path in logical.names if path.startswith("0.")}
        leaves = layouts(logical, names, "1", ("batch", "seq", "embed"))
        for name, _ in found.layers[index].named_parameters():
            joined, sizes = cuts.get(name, (None, (1,)))
            layout = Layout(tuple(leaves[f"{name}.{part}"] for part in range(len(sizes))), joined)
            known |= {f"{found.names[i]}.{name}": layout for i, kind in enumerate(kinds) if kind == index}
    embed, _ = _outside(found, known, before=True)
    head, num_logits = _outside(found, known, before=False)
    unread = {name: x for name, x in found.parameters.items() if name not in known}  # a folder has them: they come along
    known |= {name: Layout((LeafLayout(tuple((n,) for n in x.shape), (None,) * x.ndim),)) for name, x in unread.items()}
    head = (*head, *unread)
    pairs = tuple(_pairs(attends[kind]) for kind in kinds)
    windows = tuple(tuple(call.kwargs.get("window") for call in attends[kind]) for kind in kinds)
    kv_heads = tuple(tuple(call.args[1].meta["val"].shape[2] for call in attends[kind]) for kind in kinds)  # type: ignore[union-attr]
    vocab_size = num_logits if found.vocab_size is None else found.vocab_size
    return Imported(found, tuple(calls), kinds, embed, head, known, pairs, windows, kv_heads, vocab_size)  # type: ignore[arg-type]


def _probed(found: Skeleton, tokens: Tensor, positions: Tensor) -> Skeleton:
    """`found` with what the first layer shows: the size of x, and what is returned behind it."""
    x = runs.embed(found, {}, tokens, positions)
    if x.ndim != 3 or tuple(x.shape[:2]) != (_BATCH, _SEQ):
        raise ConfigError(
            f"{found.names[0]} reads x of shape {tuple(x.shape)} for tokens {(_BATCH, _SEQ)}, not (batch, row, features)"
        )
    (call,), context = runs.layer_calls(found, tokens, positions, torch.float32, count=1)
    weights = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in found.layers[0].named_parameters()}
    reading = Reading(context, _BATCH, _SEQ)
    runs.layer(found, 0, _plain(weights), x, call, reading)
    return replace(found, width=x.shape[2], behind=reading.behind)


def _pairs(calls: Sequence[fx.Node]) -> int:
    shapes = [(call.args[0].meta["val"].shape, call.args[2].meta["val"].shape) for call in calls]
    return sum(q[2] * (q[3] + v[3]) for q, v in shapes)


def _x(found: Skeleton) -> Tensor:
    return torch.empty(_BATCH, _SEQ, found.width, device="meta")


def _plain(params: Mapping[str, Tensor]) -> dict[str, Weight]:
    return {name: Weight([x], (None,) * x.ndim) for name, x in params.items()}


def _trace_layer(
    found: Skeleton, index: int, call: runs.Call, context: Mapping[str, Tensor], cuts: Mapping[str, _Cut]
) -> tuple[LogicalGraph, dict[str, _Cut]]:
    """`(the graph of a layer whose parameters are cut as cuts says, how they could be cut)`."""
    seen: dict[str, Weight] = {}

    def fn(params: dict[str, list[Tensor]], x: Tensor, context: dict[str, Tensor]) -> Tensor:
        for name, parts in params.items():
            seen[name] = Weight(parts, (None,) * parts[0].ndim, cuts[name][0] if name in cuts else None)
        return runs.layer(found, index, seen, x, call, Reading(context, _BATCH, _SEQ))

    params = {}
    for name, parameter in found.layers[index].named_parameters():
        along, sizes = cuts.get(name, (0, ()))
        params[name] = list(parameter.detach().split(sizes, along)) if sizes else [parameter.detach()]
    logical = trace(fn, (params, _x(found), dict(context)))
    return logical, {name: next(iter(weight.cuts)) for name, weight in seen.items() if len(weight.cuts) == 1}


def _outside(found: Skeleton, known: dict[str, Layout], *, before: bool) -> tuple[tuple[str, ...], int]:
    """`(the parameters that are read before the layers, or behind them, the size of the last dim of what that part gives)`.

    Adds the layouts of the parameters to `known`.
    """
    inside = tuple(f"{name}." for name in found.names)
    params = {name: x for name, x in found.parameters.items() if not name.startswith(inside)}
    tokens = torch.zeros(_BATCH, _SEQ, dtype=torch.int64, device="meta")

    def fn(params: dict[str, Tensor], x: Tensor, reads: dict[str, Tensor]) -> Tensor:
        if before:
            return runs.embed(found, _plain(params), reads["tokens"], reads["positions"])
        return runs.head(found, _plain(params), x, reads["tokens"], reads["positions"])

    reads = {"tokens": tokens, "positions": tokens[:1]}
    logical = trace(fn, (params, _x(found), reads))
    read = _reached(logical.results)
    live = {path for path, node in zip(logical.names, logical.placeholders, strict=True) if node in read}
    names = {f"0.{name}": name for name in params if f"0.{name}" in live}
    axes = ("batch", "seq", "embed" if before else "vocab")
    for name, leaf in layouts(logical, names, "" if before else "1", axes).items():
        known.setdefault(name, Layout((leaf,)))
    return tuple(names.values()), logical.results[0].meta["val"].shape[-1]


def _reached(results: list[fx.Node]) -> set[fx.Node]:
    """The nodes that results depend on."""
    found: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _signature(layer: Any, call: runs.Call) -> str:
    """What a layer computes, as far as its modules say: their classes, settings and shapes, and how it is called."""
    parts = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, tuple)) or value is None
        }
        settings = {key: value for key, value in settings.items() if key not in ("layer_idx", "layer_id", "training")}
        shapes = {key: None if x is None else tuple(x.shape) for key, x in module._parameters.items()}
        parts.append(f"{name} {type(module).__qualname__} {sorted(settings.items(), key=str)} {shapes}")
    return "\n".join([*parts, str(call.leaves)])
