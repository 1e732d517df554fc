"""Trainable: what a run needs of a chain. Model: what every language model has, whether it is declared or traced."""

import functools
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes, Chain, Segment
from mpar.models._batch import Batch
from mpar.models._init import normal
from mpar.models._matrix import Matrix, MatrixLeaf
from mpar.ops import fold_key
from mpar.tree import Tree

__all__ = ["Model", "Multiplications", "Read", "Trainable"]

Read = Callable[[str, Sequence[slice] | None], Tensor]
"""`fn(path, slices)` gives the elements within `slices` of a leaf; None: all of them."""


@dataclass(frozen=True)
class Multiplications:
    """What a token is multiplied with.

    weights: by the path of a leaf, with how many weights of it: all matrices and the head, but not the lookup in the embedding,
             and of experts only those that the token is sent to. Of a quantised weight the path is that of the weight.
    pairs:   by the name of a segment, the multiplications with each other token of a row: 2 n h for n heads of h.
    """

    weights: Mapping[str, float]
    pairs: Mapping[str, float]


class Trainable(Chain):
    """A chain that `mpar train` can train: it has a vocabulary, and says how its parameters begin.

    A subclass defines `vocab_size`, `segments`, `abstract_params`, `param_axes` and `context`; the others have defaults.
    """

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """Every batch key that it reads, with its logical axes: by default tokens and labels, (B, S)."""
        return {"tokens": ("batch", "seq"), "labels": ("batch", "seq")}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """What the loss sum of this batch is divided by: by default the number of labels that are not -100."""
        return (batch["labels"] != -100).sum().to(torch.float32)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens, without padding."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def settings(self) -> object:
        """All that says what it computes: a dataclass or a dict. A run goes on from a checkpoint only with equal settings."""
        return self

    @property
    def multiplications(self) -> Multiplications:
        """What a token is multiplied with, which counts in the FLOP/s that are reported. By default these are all parameters of
        two or more dims, and no pairs."""
        leaves = tree.leaves_with_path(self.abstract_params)
        return Multiplications({path: float(leaf.numel()) for path, leaf in leaves if leaf.ndim > 1}, {})

    @property
    def beside(self) -> "Trainable | None":
        """A model whose forward every step computes, too, and which has no backward; None, the default, without one."""
        return None

    @property
    def sequential(self) -> bool:
        """Whether a layer scans the sequence, so that its rows are never permuted."""
        return False

    @property
    def max_positions(self) -> int | None:
        """The longest row that the model can take. Only learned positions set a bound; without them it is None."""
        return None

    @property
    def next_keys(self) -> tuple[str, ...]:
        """The batch keys besides tokens and labels that multi-token prediction needs; empty without it."""
        return ()

    @property
    def hf_config(self) -> dict[str, object] | None:
        """The Hugging Face config that it was made from, which an export writes again; None: it cannot be exported."""
        return None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What tokens are multiplied with. By default each leaf of two dims, as `x @ leaf`, by its path."""
        leaves = tree.leaves_with_path(self.abstract_params)
        return tuple(Matrix(path, "linear", (MatrixLeaf(path, path, ("d", "f"), "d", "f"),)) for path, x in leaves if x.ndim == 2)

    @property
    def not_only_multiplied(self) -> frozenset[str]:
        """The paths of parameters of `plain` that this model reads by other ops too, where `plain` only multiplies with them. By
        default none."""
        return frozenset()

    def without_multi_token(self) -> "Trainable":
        """The same model without the layer that learns further tokens; its logits do not need that layer."""
        return self

    def init_std(self, path: str) -> float:
        """The standard deviation of the first values of the parameter at `path`, for `init_leaf`."""
        return 0.02

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` (default: all) of the first value of the parameter at `path`; no others are made.

        Every element must depend only on `seed`, `path` and its global index, so that it is the same on every mesh. By default
        parameters with one dim are one, biases zero, and all others normal with `init_std`.
        """
        leaf = tree.get(self.abstract_params, path)
        bounds = [range(size)[cut] for size, cut in zip(leaf.shape, slices or [slice(None)] * leaf.ndim, strict=True)]
        sizes = [len(bound) for bound in bounds]
        if "bias" in path.rpartition(".")[2] or math.prod(sizes) == 0:
            return torch.zeros(sizes, dtype=leaf.dtype)
        if leaf.ndim < 2:
            return torch.ones(sizes, dtype=leaf.dtype)
        return normal(fold_key(seed, path), bounds, leaf.dtype).mul_(self.init_std(path))

    @property
    def plain(self) -> "Trainable":
        """The model whose weights a folder has: the model itself, or what it was made of by adapters and the like."""
        return self

    def over(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """`segments`, which read parameters of `plain` by other functions than its own, such as one that keeps a cache, for the
        parameters of this model: so adapters and quantised weights are known to every chain that is made of `plain`."""
        return segments

    def plain_params(self, params: Tree, adapter: int = 0) -> Tree:
        """The parameters of `plain` that compute what `params` compute in this model; objects stand for some of the tensors, see
        `mpar.ops.StandIn`. They are for functions that read one tree, and not for compiled programs. `adapter` is the number in
        `adapter_names` of the adapter that is added, from 1 on; 0: none of these."""
        return params

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters of which each row of tokens has one, or none; empty, the default, if there are none."""
        return ()

    def gates(self, adapters: Tensor, of_last: Tensor) -> Mapping[str, Tensor]:
        """What segments read to give each token the adapter of its row; empty if there are none.

        adapters (B, T): for each token the number in `adapter_names` of its adapter, from 1 on; 0: none. of_last (B, R): the same
        for the tokens whose logits are wanted.
        """
        return {}

    @property
    def parts(self) -> "Mapping[str, Trainable]":
        """The models whose parameters it has, by the beginning of their paths: itself, unless it compares models."""
        return {"": self}

    def first_leaf(self, seed: int, path: str, slices: Sequence[slice] | None, read: Read) -> Tensor:
        """The elements within `slices` (None: all) of the leaf at `path` before training, where `read(path, slices)` gives leaves
        of `plain`."""
        return read(path, slices)

    def init(self, seed: int, dtype: torch.dtype | None = None) -> Tree:
        """Fresh parameters, of the dtype `dtype` or their own. Every element depends only on `seed`, its path and its index."""
        named, structure = tree.leaves_with_path(self.abstract_params), tree.flatten(self.abstract_params)[1]
        return tree.unflatten(structure, [self.init_leaf(seed, path).to(dtype or leaf.dtype) for path, leaf in named])


class Model(Trainable):
    """A language model as a chain of segments; it holds no tensors.

    dtype: that of its parameters; tables of RoPE and the loss are float32 or wider.
    hf_config_json, hf_generation_json: the Hugging Face files that it was made from; an export writes them again.
    """

    dtype: torch.dtype
    hf_config_json: str
    hf_generation_json: str | None

    @property
    @abstractmethod
    def name(self) -> str:
        """The Hugging Face model type."""

    @property
    @abstractmethod
    def settings(self) -> object:
        """All that says what it computes: a dataclass or a dict."""

    @property
    @abstractmethod
    def multiplications(self) -> Multiplications:
        """What a token is multiplied with."""

    @property
    def can_decode(self) -> bool:
        """Whether `decode` can go on from a state."""
        return False

    @functools.cached_property
    def hf_config(self) -> dict[str, object]:  # type: ignore[override]
        """The Hugging Face config that the model was made from; do not change it."""
        return json.loads(self.hf_config_json)

    @property
    @abstractmethod
    def hf_class(self) -> str:
        """The class in transformers that reads an export."""

    @property
    @abstractmethod
    def stored_names(self) -> Mapping[str, tuple[str, str]]:
        """For paths of leaves, where `{i}` is the index of a layer: (name of the stored tensor, transform)."""

    @property
    @abstractmethod
    def base(self) -> str:
        """The prefix of the names of all stored tensors but those of the head."""

    @property
    @abstractmethod
    def absent(self) -> tuple[str, ...]:
        """Patterns of the names of stored tensors that are not needed."""

    @property
    def hf_keys(self) -> Mapping[str, object]:
        """What an export changes in config.json, besides the class and the dtype."""
        return {}

    @abstractmethod
    def with_dtype(self, dtype: torch.dtype) -> "Model":
        """The same model with parameters of another dtype."""

    def without_multi_token(self) -> "Model":
        """The same model without the layer that learns further tokens; its logits do not need that layer."""
        return self

    @abstractmethod
    def apply(self, params: Tree, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits (B, S, vocab_size) for each position's next token. `positions` (B, S) are 0, 1, ... by default.

        `documents` (B, S): tokens see their own document only; -1 is padding.
        """

    @abstractmethod
    def decode(self, params: Tree, tokens_BS: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Logits of tokens that follow those of `state`, and the state after them. Raises ConfigError unless `can_decode`."""

    @abstractmethod
    def loss(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """`(sum of token_weight * cross-entropy in nats, weight)`, computed as in training; the loss is their quotient.

        `batch` has tokens and labels (already shifted: position s learns to give labels[s]); labels of -100 are not counted.
        """

    @abstractmethod
    def init(self, seed: int, dtype: torch.dtype | None = None) -> Tree:
        """Fresh parameters. Every element depends only on `seed`, its path and its global index."""

    @abstractmethod
    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` (default: all) of the leaf at `path` of `init(seed)`; no others are made."""
