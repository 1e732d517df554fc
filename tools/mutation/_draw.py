"""Which mutants a run tries: packages in turn, in each a random line, and one of the changes that the line allows."""

import random
from collections.abc import Mapping

from tools.mutation._mutants import Mutant, changes_meaning, mutants_of

__all__ = ["draw"]


def draw(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Up to `count` mutants of these files, by path; the same ones for the same files and seed.

    Folders take turns, so that a large one does not take all. No two mutants are on the same line, and every sort of change that
    a line allows is as likely, so that tables of numbers do not take all either.
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
    """A mutant of the last of these lines that has a valid one; the lines that were looked at are gone."""
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
    """The kind of a mutant, numbers and operators left out."""
    return "".join(letter for letter in mutant.kind if letter.isalpha())
