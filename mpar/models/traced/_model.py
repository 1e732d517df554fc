"""TracedModel: a causal model of transformers as a chain of segments, without a declaration."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpar import ops, tree
from mpar.errors import ConfigError
from mpar.models._model import Model
from mpar.models.traced._chain import TracedChain
from mpar.models.traced._skeleton import Source
from mpar.models.traced._stored import stored_names
from mpar.models.traced._traits import Traits
from mpar.tree import Tree

__all__ = ["TracedModel"]


@dataclass(frozen=True)
class TracedModel(TracedChain, Model):
    """A causal model of transformers, traced. Its parameters have the names of its module; a path joins them with dots.

    traits: what the self-check has found its rows to allow.
    """

    hf_config_json: str
    dtype: torch.dtype = torch.float32  # type: ignore[misc]
    hf_generation_json: str | None = None
    traits: Traits = Traits()  # noqa: RUF009 (it is frozen)

    @property
    def source(self) -> Source:
        """What it is made from."""
        return Source(self.hf_config_json, self.traits.attention)

    @property
    def name(self) -> str:
        """The Hugging Face model type."""
        return str(self.hf_config["model_type"])

    @property
    def settings(self) -> dict[str, object]:
        """Its config."""
        return self.hf_config

    @property
    def hf_class(self) -> str:
        """The class in transformers."""
        return type(self.imported.skeleton.module).__name__

    @functools.cached_property
    def stored_names(self) -> dict[str, tuple[str, str]]:
        """For paths of leaves: (name of the stored tensor, transform)."""
        skeleton, out = self.imported.skeleton, {}
        stored = stored_names(skeleton.module, skeleton.parameters)
        for name, layout in self.imported.layouts.items():
            tensors, count = stored[name], len(layout.leaves)
            if len(tensors) not in (1, count):
                raise ConfigError(f"cannot read {name} from {len(tensors)} tensors of each expert: it has {count} leaves")
            for index, leaf in enumerate(layout.leaves):
                tensor = tensors[index % len(tensors)]
                tensor = skeleton.saved.get(tensor, tensor)
                transform = leaf.transform(layout.joined if len(tensors) < count else None)
                transform = transform.removeprefix("a ") if "{a}" in tensor else transform
                out[f"{name}.{index}" if count > 1 else name] = (tensor, transform)
        return out

    @property
    def base(self) -> str:
        """The prefix of the names of all stored tensors but those of the head; empty if they have none."""
        base = f"{self.imported.skeleton.module.base_model_prefix}."
        return base if any(name.startswith(base) for name, _ in self.stored_names.values()) else ""

    @property
    def absent(self) -> tuple[str, ...]:
        """Patterns of names of tied weights and of buffers, which are not needed."""
        skeleton = self.imported.skeleton
        return tuple(re.escape(name) for name in (*skeleton.tied, *(name for name, _ in skeleton.module.named_buffers())))

    def with_traits(self, traits: Traits) -> "TracedModel":
        """The same model with other traits."""
        return replace(self, traits=traits)

    def with_dtype(self, dtype: torch.dtype) -> "TracedModel":
        """The same model with parameters of another dtype."""
        return replace(self, dtype=dtype)

    def init(self, seed: int, dtype: torch.dtype | None = None) -> Tree:
        """Fresh parameters: matrices normal with the config's initializer_range, gains one, biases zero."""
        like = self.abstract_params
        leaves = [self.init_leaf(seed, path).to(dtype or self.dtype) for path in tree.paths(like)]
        return tree.unflatten(tree.flatten(like)[1], leaves)

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` (default: all) of the leaf at `path` of `init(seed)`."""
        shape = tree.get(self.abstract_params, path).shape
        cuts = tuple(slices or [slice(None)] * len(shape))
        if len(shape) < 2 or path.endswith("bias"):
            gain = 0.0 if path.endswith("bias") else 1.0
            return torch.full(shape, gain, dtype=self.dtype)[cuts]
        std = float(str(self.hf_config.get("initializer_range", 0.02)))
        return (ops.random_normal(ops.fold_key(seed, path), shape) * std).to(self.dtype)[cuts]
