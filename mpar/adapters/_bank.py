"""AdapterBank: a model with several adapters, of which each row of tokens has one or none.

Its tree is that of a model with one adapter, whose rank is the sum of theirs: A and B of all stand side by side along the rank,
B times its scale. What A gives for a token is multiplied by a gate, which is 1 for the ranks of its own adapter and 0 for all
others. So the adapters of all rows cost two products for each matrix, however many there are.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import tree
from mpar.adapters._leaves import ADAPTERS, AdapterLeaf
from mpar.adapters._lora import LoRA
from mpar.adapters._low_rank import RANK
from mpar.adapters._model import AdaptedModel, add, base_params, with_adapters
from mpar.errors import ConfigError
from mpar.models import Matrix, Trainable
from mpar.tree import Tree

__all__ = ["AdapterBank", "bank_of"]

_ALONE, _BANK = "default", "bank"
"""The names of an adapter in a model of its own, and of all together in the tree of a bank."""


@dataclass(frozen=True)
class Columns:
    """The columns of A that belong to an adapter, by its number from 1 on. They are as many as its rank."""

    number: int
    rank: int
    scale: float


def bank_of(base: Trainable, loras: Mapping[str, LoRA]) -> "AdapterBank":
    """`base` with adapters by their names, of which each row of tokens has one or none.

    Raises ConfigError, listing all of them, for adapters that are more than products A B, or without any.
    """
    problems = [f"{name or '(empty)'} {why}" for name, lora in loras.items() for why in _not_by_row(name, lora)]
    if problems or not loras:
        lines = "\n  ".join(problems or ["there is none"])
        raise ConfigError(
            f"cannot choose among these adapters for each row of tokens:\n  {lines}\n"
            "Only A and B can be chosen. Merge such an adapter into a model of its own, which `mpar export` writes."
        )
    alone = {name: add(base, lora, _ALONE) for name, lora in loras.items()}
    ranks: dict[str, int] = {}
    for model in alone.values():
        for adapted in model.adapted[_ALONE]:
            ranks[adapted.matrix.name] = ranks.get(adapted.matrix.name, 0) + adapted.rank
    rank_of = {re.escape(name): rank for name, rank in ranks.items()}
    targets = "|".join(rank_of)
    combined = LoRA(targets=targets, rank_pattern=rank_of, alpha_pattern={name: float(rank) for name, rank in rank_of.items()})
    return AdapterBank(base, ((_BANK, combined),), (_BANK,), tuple(alone.items()))


def _not_by_row(name: str, lora: LoRA) -> list[str]:
    """What of an adapter cannot be chosen for each row."""
    wrong = {
        "has no name": not name,
        "has magnitudes (DoRA), which change the weight": lora.dora,
        f"trains {', '.join(lora.modules_to_save)} in full (modules_to_save)": bool(lora.modules_to_save),
        f"trains biases (bias={lora.bias})": lora.bias != "none",
        f"changes the weight where it begins (init={lora.init})": lora.init in ("pissa", "olora"),
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]


@dataclass(frozen=True)
class AdapterBank(AdaptedModel):
    """A model with several adapters, of which each row of tokens has one or none; `bank_of` makes it.

    alone: for the name of each adapter, the model that has only this one. In training all of them would be added up.
    """

    alone: tuple[tuple[str, AdaptedModel], ...]

    @functools.cached_property
    def adapter_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the adapters."""
        return tuple(name for name, _ in self.alone)

    @functools.cached_property
    def columns(self) -> dict[str, tuple[Columns, ...]]:
        """By the name of each adapted matrix: the ranks of the adapters that it has, in their order."""
        found: dict[str, list[Columns]] = {}
        for number, (_, model) in enumerate(self.alone, 1):
            for adapted in model.adapted[_ALONE]:
                found.setdefault(adapted.matrix.name, []).append(Columns(number, adapted.rank, adapted.scale))
        return {name: tuple(columns) for name, columns in found.items()}

    @functools.cached_property
    def _gates(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By its key in the context: the numbers and ranks of the adapters that a gate lets through. Most matrices share one."""
        return {self.gate_of(matrix): self._ranks(matrix) for matrix in self._matrices}

    @functools.cached_property
    def _matrices(self) -> tuple[Matrix, ...]:
        return tuple(adapted.matrix for adapted in self.adapted[_BANK])

    def _ranks(self, matrix: Matrix) -> tuple[tuple[int, int], ...]:
        return tuple((each.number, each.rank) for each in self.columns[matrix.name])

    @functools.cached_property
    def _distinct(self) -> list[tuple[tuple[int, int], ...]]:
        return list(dict.fromkeys(map(self._ranks, self._matrices)))

    def gate_of(self, matrix: Matrix) -> str:
        """The key of the context with the gate of a matrix's adapters: of all tokens, or of those whose logits are wanted."""
        return f"{'last_' if matrix.kind == 'head' else ''}gate_{self._distinct.index(self._ranks(matrix))}"

    def gates(self, adapters: Tensor, of_last: Tensor) -> dict[str, Tensor]:
        """See `Trainable`: (B, T, ranks), and (B, R, ranks) of `of_last`, with 1 for the ranks of the token's adapter, else 0."""
        dtype = next(leaf.dtype for leaf in tree.leaves(self.plain.abstract_params) if leaf.is_floating_point())
        return {
            key: torch.cat([_alike(of_last if key.startswith("last_") else adapters, *part, dtype) for part in ranks], -1)
            for key, ranks in self._gates.items()
        }

    def plain_params(self, params: Tree, adapter: int = 0) -> Tree:
        """See `Trainable`: the weights with one adapter, or without."""
        base = base_params(self, params)
        if adapter == 0:
            return self.base.plain_params(base)
        _, model = self.alone[adapter - 1]
        taken = {
            path: self._taken(leaf, tree.get(params, _in_bank(path)), adapter) for path, leaf in model.leaves.items()
        }
        return model.plain_params(with_adapters(base, taken))

    def _taken(self, leaf: AdapterLeaf, joined: Tensor, number: int) -> Tensor:
        """A leaf of one adapter out of that of the bank."""
        columns = self.columns[leaf.adapted.matrix.name]
        start = sum(each.rank for each in columns if each.number < number)
        cut = joined.narrow(leaf.letters.index(RANK), start, leaf.adapted.rank)
        return cut / leaf.adapted.scale if leaf.part == "b" else cut

    def joined(self, path: str, read: Callable[[str, str], Tensor]) -> Tensor:
        """The leaf of the bank at `path`, where `read(name, path)` gives that of each adapter at the path in a model of its own.

        Raises ConfigError for values that are not finite: rows with other adapters would not stay free of them.
        """
        leaf = self.leaves[path]
        made = []
        for each in self.columns[leaf.adapted.matrix.name]:
            name = self.adapter_names[each.number - 1]
            value = read(name, _alone_path(path)).to(tree.get(self.abstract_params, path).dtype)
            if not value.isfinite().all():
                raise ConfigError(f"cannot choose the adapter {name!r}: {_alone_path(path)} has values that are not finite")
            made.append(value * each.scale if leaf.part == "b" else value)
        return torch.cat(made, leaf.letters.index(RANK))


def _alike(adapters: Tensor, number: int, rank: int, dtype: torch.dtype) -> Tensor:
    """The gate of the `rank` columns of one adapter."""
    return (adapters == number).to(dtype)[..., None].expand(-1, -1, rank)


def _alone_path(path: str) -> str:
    return f"{ADAPTERS}.{_ALONE}.{path.removeprefix(f'{ADAPTERS}.{_BANK}.')}"


def _in_bank(path: str) -> str:
    return f"{ADAPTERS}.{_BANK}.{path.removeprefix(f'{ADAPTERS}.{_ALONE}.')}"
