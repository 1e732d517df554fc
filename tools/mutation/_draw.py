"""Which mutants a run tries: packages in turn, in each a random line, and one of the changes that the line allows."""

import random
from collections.abc import Mapping

from tools.mutation._mutants import Mutant, changes_meaning, mutants_of

__all__ = ["draw"]


def draw(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Up to `count` mutants of these files, which are given by path. The same files and seed give the same mutants.

    Folders take turns, so that mutants are not all from a large folder. No two mutants are on the same line, and all sorts of
    change that a line allows are equally likely, so that they are not all from tables of numbers either.
    """
    rng = random.Random(seed)
    lines: dict[str, list[list[Mutant]]] = {}
    for path in sorted(sources):
        by_line: dict[int, list[Mutant]] = {}
        for mutant in mutants_of(path, sources[path]):
            by_line.setdefault(mutant.line, []).append(mutant)
        lines.setdefault(path.rpartition("/")[0], []).extend(by_line.values())
    folders = sorted(lines)
    for folder in folders:
        rng.shuffle(lines[folder])
    drawn: list[Mutant] = []
    while len(drawn) < count and any(lines.values()):
        for folder in rng.sample(folders, len(folders)):
            found = _next(lines[folder], sources, rng)
            drawn += [found] if found is not None else []
    return drawn[:count]


def _next(lines: list[list[Mutant]], sources: Mapping[str, str], rng: random.Random) -> Mutant | None:
    """A mutant of the last line that has a valid one, or None. The lines that were looked at are removed from `lines`."""
    while lines:
        kinds: dict[str, list[Mutant]] = {}
        for mutant in lines.pop():
            kinds.setdefault(_sort_of(mutant), []).append(mutant)
        for kind in rng.sample(sorted(kinds), len(kinds)):
            mutant = rng.choice(kinds[kind])
            if changes_meaning(mutant, sources[mutant.path]):
                return mutant
    return None


def _sort_of(mutant: Mutant) -> str:
    """The kind of a mutant without numbers and operators."""
    return "".join(letter for letter in mutant.kind if letter.isalpha())
