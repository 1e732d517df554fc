"""Targets: which matrices of a model have an adapter, by the rules of PEFT for names."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mpar.adapters._lora import ALL_LINEAR, LoRA
from mpar.errors import ConfigError
from mpar.models import Matrix, Trainable

__all__ = ["Adapted", "adapted_matrices", "saved_leaves"]


@dataclass(frozen=True)
class Adapted:
    """A matrix with an adapter."""

    matrix: Matrix
    rank: int
    scale: float


def adapted_matrices(model: Trainable, lora: LoRA) -> tuple[Adapted, ...]:
    """The matrices of `model` that have an adapter, in its order.

    Raises ConfigError, listing all of them, for targets that match nothing, with the nearest names, and for matrices that cannot
    have such an adapter.
    """
    known = model.matrices
    chosen = [matrix for matrix in known if _is_target(matrix, lora)]
    problems = [*_unmatched("targets", lora.targets, known), *_unmatched("modules_to_save", lora.modules_to_save, known)]
    if not chosen and not problems:
        problems.append(f"exclude={lora.exclude!r} and layers={lora.layers} leave none of the targets {lora.targets!r}")
    problems += [problem for matrix in chosen for problem in _impossible(matrix, lora)]
    if problems:
        raise ConfigError(f"cannot add an adapter to this {model.name} model:\n  " + "\n  ".join(problems))
    return tuple(Adapted(matrix, lora.rank_of(matrix.name), lora.scale_of(matrix.name)) for matrix in chosen)


def saved_leaves(model: Trainable, lora: LoRA) -> tuple[str, ...]:
    """The paths of the leaves of the modules in `modules_to_save`."""
    saved = [matrix for matrix in model.matrices if _ends(matrix.name, lora.modules_to_save)]
    tied = [matrix.name for matrix in saved if matrix.segments is not None]
    if tied:
        raise ConfigError(
            f"cannot train {', '.join(tied)} in full: embedding and head of this {model.name} model are one tensor, of which "
            "PEFT would make two.\nLeave them out of modules_to_save, or give them an adapter."
        )
    return tuple(leaf.path for matrix in saved for leaf in matrix.leaves)


def _is_target(matrix: Matrix, lora: LoRA) -> bool:
    if _matches(matrix.name, lora.exclude) or _ends(matrix.name, lora.modules_to_save):
        return False
    number = re.search(r"\.(\d+)\.", matrix.name)
    if lora.layers is not None and (number is None or int(number[1]) not in lora.layers):
        return False
    if lora.targets == ALL_LINEAR:
        return matrix.kind in ("linear", "parameter")
    return _matches(matrix.name, lora.targets)


def _matches(name: str, wanted: str | tuple[str, ...]) -> bool:
    return bool(re.fullmatch(wanted, name)) if isinstance(wanted, str) else _ends(name, wanted)


def _ends(name: str, wanted: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def _unmatched(field: str, wanted: str | tuple[str, ...], known: Iterable[Matrix]) -> list[str]:
    """A line for each name that no matrix has, with the names that are nearest to it."""
    names = [matrix.name for matrix in known]
    if wanted == ALL_LINEAR:
        return []
    alone = [wanted] if isinstance(wanted, str) else wanted
    missing = [item for item in alone if not any(_matches(name, item if isinstance(wanted, str) else (item,)) for name in names)]
    ends = list(
        dict.fromkeys(
            name.rpartition(".")[2] if not name.endswith(".weight") else ".".join(name.split(".")[-2:]) for name in names
        )
    )
    lines = []
    for item in missing:
        near = difflib.get_close_matches(item, ends + names, n=3, cutoff=0.5) or ends
        lines.append(f"{field} has {item!r}, which matches no matrix; nearest: {', '.join(near)}")
    return lines


def _impossible(matrix: Matrix, lora: LoRA) -> list[str]:
    """What an adapter of this matrix cannot have; PEFT has none of it either, but DoRA of embeddings."""
    if matrix.kind == "parameter":
        wrong = {"dropout": lora.dropout > 0, "dora": lora.dora, f"init={lora.init}": lora.init in ("pissa", "olora")}
    elif matrix.kind == "embedding":
        wrong = {"dora": lora.dora, f"init={lora.init}": lora.init in ("pissa", "olora")}
    else:
        tied = matrix.segments is not None
        wrong = {f"init={lora.init}, because it is tied to the embedding": tied and lora.init in ("pissa", "olora")}
    return [
        f"{matrix.name}, a matrix of kind {matrix.kind}, has no {text}; name it in exclude"
        for text, is_wrong in wrong.items()
        if is_wrong
    ]
