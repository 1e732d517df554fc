"""CachedDecoder: a decoder as a chain that keeps a cache. Its program reads the next tokens of many rows and gives logits."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mpar import ops, tree
from mpar.chain import Axes, Chain, Segment
from mpar.errors import ConfigError
from mpar.models import decoder
from mpar.models._declared import DeclaredModel
from mpar.models._model import Trainable
from mpar.models.decoder import BlockSegment
from mpar.models.layers import Cache, CacheSizes, depends_on_length, is_sizes, part_of, rope_tables, table_keys
from mpar.tree import Tree

__all__ = ["SCREEN", "CachedDecoder", "can_screen", "with_cache"]

SCREEN = "screen"
"""Where the screen of the output matrix is among the parameters of a `CachedDecoder` that has one."""


def with_cache(
    model: Trainable, sizes: CacheSizes, dtype: torch.dtype | None = None, *, screened: bool = False
) -> "CachedDecoder":
    """The chain that goes on with rows from a cache of these sizes. `dtype` is that of keys and values; None: that of the model.
    The model may have adapters, or quantised weights.

    Its parameters are those of the model, without the layer that learns further tokens. screened: and a `mpar.ops.Screen` of the
    output matrix, which only a model may have that `can_screen`. Raises ConfigError if a layer has no such cache, if a rotation
    depends on the length of the row, or if the model has learned too few positions for the pages of a row.
    """
    problems, plain = [], model.plain
    if not isinstance(plain, DeclaredModel):
        problems.append("it was traced, and its graph does not say what a layer keeps of earlier tokens")
    else:
        mixers = dict.fromkeys(type(layer.mixer).__name__ for layer in plain.config.layers if not _has_cache(layer.mixer))
        problems += [f"it has layers of {name.removesuffix('Config')}, which keep no pages" for name in mixers]
        if any(depends_on_length(rope) for _, rope in plain.config.ropes):
            problems.append("its RoPE turns earlier tokens anew when a row grows")
        if model.max_positions is not None and model.max_positions <= (sizes.pages_per_row - 1) * sizes.page_size:
            problems.append(
                f"it has learned {model.max_positions} positions, which do not reach the last of {sizes.pages_per_row} pages of "
                f"{sizes.page_size}"
            )
    if problems or not isinstance(plain, DeclaredModel):
        raise ConfigError(
            f"cannot keep a cache of pages for this {model.name} model:\n  " + "\n  ".join(problems) + "\nUse mpar.generate."
        )
    return CachedDecoder(model.without_multi_token(), sizes, dtype or plain.dtype, screened)


def can_screen(model: Trainable) -> bool:
    """Whether the logits of a model are the products of features with an output matrix that is as it is stored. Those of a model
    with adapters, with quantised weights or with a soft cap are not."""
    return isinstance(model, DeclaredModel) and model.config.logits_soft_cap is None


def _has_cache(mixer: object) -> bool:
    return part_of(mixer).cached is not None  # type: ignore[arg-type]


def _chosen(model: Trainable) -> tuple[str, ...]:
    """The key of a batch that says which adapter each row has; nothing if there are none."""
    return ("adapters",) if model.adapter_names else ()


def _without_data(shapes: Tree, dtype: torch.dtype) -> Tree:
    leaves, structure = tree.flatten(shapes, is_leaf=is_sizes)
    return tree.unflatten(structure, [torch.empty(shape, dtype=dtype, device="meta") for shape in leaves])


@dataclass(frozen=True)
class _CachedBlock:
    """The function of a layer with a cache. Equal layers have equal functions, so that the compiler makes one kind for them."""

    block: BlockSegment
    sizes: CacheSizes

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], state: tuple[Cache[Tensor]], *, training: bool
    ) -> tuple[Tensor, tuple[Cache[Tensor]], dict[str, Tensor]]:
        return self.block.cached(params, x, context, state, self.sizes, training=training)


@dataclass(frozen=True)
class CachedDecoder(Chain):
    """A decoder with a cache; see `with_cache`. Prompts and new tokens are read alike: a step takes some tokens of some rows.

    Its batch, with B groups, T tokens, R slots of rows and L pages each:

    tokens, positions, rows (B, T): the tokens, where in its row each stands, and in which slot this row is; -1 is padding.
    pages (B, R * L):               for each slot, the numbers of its row's pages, in the order of positions.
    last (B, R):                    for each slot, the place among the tokens of the one whose logits are wanted; -1 for none.
    adapters (B, R):                for each slot, the number of its row's adapter, 0: none; only if there are `adapter_names`.
    greedy (B, R):                  for each slot, whether only its largest logit is wanted (bool); only if it is `screened`.

    Tokens of one row stand one after the other. The result is logits (B, R, vocab_size), whose rows are arbitrary where `last`
    is -1.
    """

    model: Trainable
    sizes: CacheSizes
    dtype: torch.dtype
    screened: bool = False

    @property
    def _plain(self) -> DeclaredModel:
        return cast(DeclaredModel, self.model.plain)  # `with_cache` refuses others

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Embedding, blocks with their caches, head."""
        config = self._plain.config
        first, *blocks, last = self._plain.segments
        head = decoder.head_segment(config)
        logits = decoder.ScreenedHeadSegment(head) if self.screened else head.last_logits
        paths = (*last.paths, SCREEN) if self.screened else last.paths
        cached = {layer: _CachedBlock(BlockSegment(layer), self.sizes) for layer in config.layers}
        segments = (
            first,
            *(
                Segment(block.name, cached[layer], block.paths, block.out_axes, state=(block.name,))
                for block, layer in zip(blocks, config.layers, strict=True)
            ),
            Segment(last.name, logits, paths, {"logits": ("batch", None, None)}),
        )
        return self.model.over(segments)

    @functools.cached_property
    def abstract_params(self) -> Tree:  # type: ignore[override]
        """The parameter tree of the model, and the screen."""
        made = self.model.abstract_params
        if not self.screened:
            return made
        size = tree.get(made, self._plain.head_path).shape
        V, D = size if self._plain.config.tied else size[::-1]
        parts = [torch.empty(V, D, dtype=torch.uint8, device="meta"), *(torch.empty(V, dtype=torch.int32, device="meta"),) * 2]
        return {**tree.children(made), SCREEN: ops.Screen(*parts)}

    @functools.cached_property
    def param_axes(self) -> Tree:  # type: ignore[override]
        """The logical axes of the parameters."""
        axes = self.model.param_axes
        return {**tree.children(axes), SCREEN: ops.Screen(("vocab", "embed"), ("vocab",), ("vocab",))} if self.screened else axes

    @property
    def frozen(self) -> frozenset[str]:
        """What the model freezes, which is stored as training stores it, and the screen."""
        return self.model.frozen | set(self._parts_of_screen)

    @property
    def stands_for(self) -> Mapping[str, int]:
        """As the model; the screen has no parameters of its own."""
        return {**self.model.stands_for, **dict.fromkeys(self._parts_of_screen, 0)}

    @property
    def _parts_of_screen(self) -> list[str]:
        return [f"{SCREEN}.{part}" for part in tree.paths(tree.get(self.abstract_params, SCREEN))] if self.screened else []

    @functools.cached_property
    def abstract_state(self) -> Tree:
        """The cache of each layer."""
        functions = [part_of(layer.mixer).cache_shapes for layer in self._plain.config.layers]
        layers = [fn(layer.mixer, self.sizes) for fn, layer in zip(functions, self._plain.config.layers, strict=True) if fn]
        wide = torch.promote_types(self.dtype, torch.float32)  # of scans, whose state is a sum over all tokens
        dtypes = [wide if layer.sequential else self.dtype for layer in self._plain.config.layers]
        return {"layers": [_without_data(shapes, dtype) for shapes, dtype in zip(layers, dtypes, strict=True)]}

    @functools.cached_property
    def state_axes(self) -> Tree:
        """The logical axes of the caches."""
        return {"layers": [part_of(layer.mixer).cache_axes for layer in self._plain.config.layers]}

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The entries of a batch, see the class."""
        tokens: dict[str, Axes] = dict.fromkeys(("tokens", "positions", "rows"), ("batch", "seq"))
        greedy = ("greedy",) if self.screened else ()
        rows: dict[str, Axes] = dict.fromkeys(("pages", "last", *_chosen(self.model), *greedy), ("batch", None))
        return {**tokens, **rows}

    @property
    def batch_shape(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each entry of a batch."""
        sizes = self.sizes
        lengths = dict.fromkeys(("tokens", "positions", "rows"), sizes.tokens)
        lengths |= {"pages": sizes.rows * sizes.pages_per_row, "last": sizes.rows}
        lengths |= dict.fromkeys(_chosen(self.model), sizes.rows)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
        shapes = {key: ((sizes.groups, length), torch.int64) for key, length in lengths.items()}
        return shapes | ({"greedy": ((sizes.groups, sizes.rows), torch.bool)} if self.screened else {})

    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> dict[str, Tensor]:
        """What segments read: the entries of the batch, where the rows are called documents; RoPE tables at the positions; and
        the place in the pools of each token's keys, which is 0 for padding."""
        tokens, positions, rows = batch["tokens"], batch["positions"], batch["rows"]
        sizes = self.sizes
        index_BT = rows.clamp(min=0) * sizes.pages_per_row + positions // sizes.page_size
        places_BT = batch["pages"].gather(1, index_BT) * sizes.page_size + positions % sizes.page_size
        context = {
            "tokens": tokens,
            "positions": positions,
            "documents": rows,
            "pages": batch["pages"].unflatten(1, (sizes.rows, sizes.pages_per_row)),
            "places": places_BT.masked_fill(rows < 0, 0),
            "last": batch["last"],
        }
        for name, rope in self._plain.config.ropes:
            tables = rope_tables(rope, tokens, positions, torch.promote_types(self._plain.dtype, torch.float32))
            context |= zip(table_keys(name), tables, strict=True)
        of_tokens = decoder.all_have_logits(tokens, batch["last"])  # and not of rows
        for key in _chosen(self.model):
            each_BT = batch[key].gather(1, rows.clamp(min=0))
            context |= self.model.gates(each_BT, each_BT if of_tokens else batch[key])
        if self.screened:
            greedy = batch["greedy"]
            context["greedy"] = greedy.gather(1, rows.clamp(min=0)) | (rows < 0) if of_tokens else greedy
        return context

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The number of tokens whose logits are wanted; no loss is divided by it."""
        return (batch["last"] >= 0).sum().to(torch.float32)
