"""The signature of a primitive: the names of its operands, results and parameters, and its schema for torch."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Signature", "parse_signature"]


@dataclass(frozen=True)
class Signature:
    """The operands, results and parameters of a primitive.

    optional:    operands that may be None.
    params:      the static keyword arguments with their types in torch's schema language.
    takes_lists: whether some operand is a list of tensors; such an op is used in programs only, and has no gradient and no vmap.
    schema:      the signature in torch's schema language.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    optional: frozenset[str]
    params: dict[str, str]
    takes_lists: bool
    schema: str


def parse_signature(text: str, params: Mapping[str, str]) -> Signature:
    """The signature that is written as `"x, weight?, xs[] -> y"`: an operand with `?` may be None, one with `[]` is a list."""
    left, right = ([part.strip() for part in side.split(",") if part.strip()] for side in text.split("->"))
    return Signature(
        operands=tuple(part.rstrip("?[]") for part in left),
        results=tuple(part.rstrip("[]") for part in right),
        optional=frozenset(part[:-1] for part in left if part.endswith("?")),
        params=dict(params),
        takes_lists=any(part.endswith("[]") for part in left),
        schema=_schema(left, right, params),
    )


def _schema(operands: list[str], results: list[str], params: Mapping[str, str]) -> str:
    keywords = ["*", *(f"{kind} {name}" for name, kind in params.items())] if params else []
    arguments = ", ".join([*(_tensor(part) for part in operands), *keywords])
    given = ", ".join("Tensor[]" if part.endswith("[]") else "Tensor" for part in results)
    return f"({arguments}) -> {f'({given})' if len(results) > 1 else given}"


def _tensor(part: str) -> str:
    if part.endswith("[]"):
        return f"Tensor[] {part[:-2]}"
    return f"Tensor? {part[:-1]}" if part.endswith("?") else f"Tensor {part}"
