"""Modules: a model of a user's own, any `torch.nn.Module` with a list of blocks, as the skeleton that is traced."""

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import nn

from mpar.errors import ConfigError
from mpar.models.traced._norms import replace_norms
from mpar.models.traced._rotations import replace_rotations
from mpar.models.traced._skeleton import Skeleton, tied_names

__all__ = ["ModuleSource", "module_source"]

_POSITIONS = ("position_ids", "positions")
"""Names of an argument by which a module may be given positions."""


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """What a model is traced from: a copy of a module without weights. Two sources are the same only if they are one object."""

    found: Skeleton

    def skeleton(self) -> Skeleton:
        """The module without weights."""
        return self.found

    def label(self, found: Skeleton) -> str:
        """What messages call it."""
        return type(found.module).__name__


def module_source(module: nn.Module) -> ModuleSource:
    """The source of a copy of `module` in evaluation, whose parameters are on meta, as float32 like floating buffers.

    Raises ConfigError if it has no blocks.
    """
    weights = {id(x): nn.Parameter(torch.empty_like(x, device="meta"), x.requires_grad) for x in module.parameters()}
    bare = copy.deepcopy(module, memo=dict(weights)).float().eval()
    names, blocks = _blocks(bare)
    replace_norms(bare)
    replace_rotations(bare)
    known = inspect.signature(bare.forward).parameters
    found = Skeleton(
        module=bare,
        layers=blocks,
        names=names,
        tied=tied_names(bare),
        saved={},
        buffers=frozenset(),
        masked=False,
        options={},
        positions=next((name for name in _POSITIONS if name in known), None),
        vocab_size=None,
    )
    return ModuleSource(found)


def _blocks(module: nn.Module) -> tuple[tuple[str, ...], tuple[nn.Module, ...]]:
    """The list whose modules have the most parameters, and the names of these."""
    parts = [(name, part) for name, part in module.named_modules() if name]
    lists = {name: tuple(part) for name, part in parts if isinstance(part, (nn.ModuleList, nn.Sequential))}
    if not any(lists.values()):
        raise ConfigError(
            f"cannot find the blocks of {type(module).__name__}: looked for a torch.nn.ModuleList or Sequential within it, whose "
            f"modules forward calls one after the other; it has "
            f"{', '.join(name for name, _ in module.named_children()) or 'no modules'}."
            "\nPut the blocks that follow one another into self.blocks = torch.nn.ModuleList([...])."
        )
    name = max(lists, key=lambda name: sum(x.numel() for block in lists[name] for x in block.parameters()))
    return tuple(f"{name}.{i}" for i in range(len(lists[name]))), lists[name]
