"""Layout: which segments of the chain belong to which stage.

By default layers are spread evenly. A layout can also give the layers of each stage, balance stages by cost, or be written in the
letters of Megatron-LM (`--pipeline-model-parallel-layout`): `Et*3|(tt|)*29m|L`.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite, lcm

from mpar.errors import ConfigError

__all__ = ["balance", "even", "layout_letters", "parse_layout", "stage_ranges"]

LETTERS = {"E": "embedding", "t": "layer", "m": "MTP layer", "L": "head"}
KIND_OF = {"embed": "E", "mtp": "m", "head": "L"}  # by the first word of a segment's name; all others are layers
LONGEST = 100_000  # most letters of a layout with repetitions written out: far more than any model has


def stage_ranges(
    names: Sequence[str], num_stages: int, layout: str | Sequence[int] | None = None, *, costs: Sequence[float] | None = None
) -> tuple[range, ...]:
    """For each stage the range of its segments, as indices into `names`, the names of all segments in order.

    `embed` and `embed.*` are the embedding, `mtp.*` are MTP layers, `head` and `head.*` are the head; all other segments are
    layers. The embedding is in the first stage and the head in the last. layout:
        None          layers are spread as evenly as possible (see `even`)
        "balance"     the most expensive stage is as cheap as possible (see `balance`); needs `costs`, one for each segment
        another str   letters for the segments of each stage (see `parse_layout`)
        ints          layers of each stage; 0 leaves a stage without layers, and MTP layers go with the head
    Raises ConfigError, which has the sums, if a layout does not fit the model or the number of stages.
    """
    if num_stages < 1:
        raise ConfigError(f"a pipeline of {num_stages} stages: at least one is needed")
    if not isinstance(layout, Sequence | None):
        raise ConfigError(f'a layout is None, "balance", letters, or layers of each stage; here it is {layout!r}')
    kinds = _kinds(names)
    if (costs is not None) != (layout == "balance"):
        raise ConfigError(f'costs belong to the layout "balance": the layout is {layout!r}, costs are {_given(costs)}')
    if costs is not None:
        if len(costs) != len(names):
            raise ConfigError(f"cannot balance {len(names)} segments by {len(costs)} costs: one is needed for each")
        return balance(costs, num_stages)
    if layout is None:
        stages = _letters(even(kinds.count("t"), num_stages), kinds)
    elif isinstance(layout, str):
        stages = parse_layout(layout)
    else:
        stages = _letters(layout, kinds)
    wrong = _mismatches(stages, kinds, num_stages)
    if wrong:
        raise ConfigError(f"cannot split {kinds.count('t')} layers into {num_stages} stages by {layout!r}:\n" + "\n".join(wrong))
    size = {"E": kinds.count("E"), "t": 1, "m": 1, "L": kinds.count("L")}
    ends = [0, *accumulate(sum(size[letter] for letter in stage) for stage in stages)]
    assert ends[-1] == len(names)
    return tuple(range(start, end) for start, end in pairwise(ends))


def layout_letters(stage_of: Mapping[str, int]) -> str:
    """The layout in letters that puts each segment into its stage by `stage_of`, whose names are in the order of the chain."""
    names = list(stage_of)
    letters = [""] * (1 + max(stage_of.values()))
    for letter, name in zip(_kinds(names), names, strict=True):
        drawn = letters[stage_of[name]]
        if letter not in "EL" or letter not in drawn:  # one letter stands for all the segments of an embedding or a head
            letters[stage_of[name]] = drawn + letter
    return "|".join(letters)


def even(num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """The number of layers of each stage. Any two differ by at most one: `even(30, 4)` is (7, 8, 8, 7).

    The last stage also computes the head, and early stages keep more microbatches in memory, so the stages shortly before the
    last get one layer more. `first` and `last` fix the layers of the first and last stage (Megatron-LM's
    num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, but for one stage, not for all stages of a rank).
    Raises ConfigError if a stage would be left empty.
    """
    if num_stages < 1:
        raise ConfigError(f"a pipeline of {num_stages} stages: at least one is needed")
    fixed = [f"{word} {count}" for word, count in (("first", first), ("last", last)) if count is not None]
    middle = num_stages - len(fixed)
    remaining = num_layers - (first or 0) - (last or 0)
    attempt = f"cannot spread {num_layers} layers over {num_stages} stages" + (f" with {' and '.join(fixed)}" if fixed else "")
    if middle < 0:
        raise ConfigError(f"{attempt}: a single stage is both the first and the last; give one of them")
    if min(remaining, first or 0, last or 0, num_layers) < 0 or (middle == 0 and remaining):
        raise ConfigError(f"{attempt}: {remaining} layers would be left for the other {middle} stages")
    if remaining < middle and num_stages > 1:
        raise ConfigError(
            f"{attempt}: {remaining} layers for {middle} stages leave {middle - remaining} empty; "
            f"use {num_layers} stages or fewer, or say which are empty by giving the layers of each stage"
        )
    least, over = divmod(remaining, middle) if middle else (0, 0)
    light_end = 1 if last is None else 0
    counts = [least] * (middle - over - light_end) + [least + 1] * over + [least] * light_end if middle else []
    return (*([] if first is None else [first]), *counts, *([] if last is None else [last]))


def parse_layout(text: str) -> tuple[str, ...]:
    """The letters of each stage of a layout as Megatron-LM writes it: `parse_layout("Et*2|(t|)*2L")` is ("Ett", "t", "t", "L").

    E is the embedding, t a layer, m an MTP layer, L the head. `|` ends a stage, which may be empty. `*n` repeats the letter, bar
    or group in parentheses before it. Commas and spaces are ignored. Raises ConfigError, which shows the first mistake.
    """
    groups: list[tuple[int, list[str]]] = [(0, [])]  # open groups, innermost last: (index of the parenthesis, parts)
    size = position = 0
    repeatable = False
    while position < len(text):
        character, parts, start = text[position], groups[-1][1], position
        position += 1
        if character in ", ":
            continue
        if character in "EtmL|":
            parts.append(character)
            size += 1
        elif character == "(":
            groups.append((start, []))
        elif character == ")":
            if len(groups) == 1:
                raise _mistake(text, start, "this parenthesis was never opened")
            groups.pop()
            groups[-1][1].append("".join(parts))
        elif character == "*":
            while position < len(text) and text[position] in "0123456789, ":
                position += 1
            digits = text[start + 1 : position].replace(",", " ").split()
            if len(digits) > 1:
                raise _mistake(text, start, f"* is followed by {len(digits)} numbers")
            times = "".join(digits).lstrip("0")
            if not repeatable:
                raise _mistake(text, start, "nothing to repeat: a letter, a bar or a closed group comes before *")
            if not times:
                raise _mistake(text, start, "* is followed by a number, 1 or more")
            factor = int(times) if len(times) < 7 else LONGEST + 1
            size += len(parts[-1]) * (factor - 1)
            if factor > LONGEST or size > LONGEST:
                raise _mistake(text, start, f"written out, the layout is longer than {LONGEST} letters")
            parts[-1] *= factor
        else:
            raise _mistake(text, start, f"{character!r} is none of E t m L | * ( )")
        repeatable = character in "EtmL|)"
    if len(groups) > 1:
        raise _mistake(text, groups[-1][0], "this parenthesis is never closed")
    return tuple("".join(groups[0][1]).split("|"))


def balance(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut segments with these costs (>= 0) into `num_stages` ranges, so that the most expensive one is as cheap as possible.

    No range is empty. Of all such cuts, the result has the least sum of squares, and of these the cheapest first stages, because
    these keep more microbatches in memory. The result is exact: floats are compared as fractions. Takes time in
    O(stages * segments * segments of a stage).
    """
    if not 1 <= num_stages <= len(costs):
        raise ConfigError(f"cannot cut {len(costs)} segments into {num_stages} stages, none of them empty")
    bad = [f"segment {i}: {cost}" for i, cost in enumerate(costs) if not (isfinite(cost) and cost >= 0)]
    if bad:
        raise ConfigError(f"costs must be finite and not negative: {', '.join(bad)}")
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    limit = _least_limit(sums, num_stages)
    count = len(costs)
    best: list[float] = [inf] * count + [0]  # at i: least sum of squares for the segments from i on, in `later` stages
    ends = []  # for each stage, from the last to the first: where it ends if it begins with segment i
    for later in range(num_stages):
        longer, end_of = best, [0] * (count + 1)
        best = [inf] * (count + 1)
        for i in range(num_stages - 1 - later, count - later):
            for end in range(i + 1, count - later + 1):
                cost = sums[end] - sums[i]
                if cost > limit:
                    break
                if longer[end] != inf and longer[end] + cost * cost < best[i]:
                    best[i], end_of[i] = longer[end] + cost * cost, end
        ends.append(end_of)
    starts = [0]
    for end_of in reversed(ends):
        starts.append(end_of[starts[-1]])
    return tuple(range(start, end) for start, end in pairwise(starts))


def _least_limit(sums: list[int], num_stages: int) -> int:
    """The least cost of the most expensive stage, by bisection over whole numbers."""
    low, high = max(max(b - a for a, b in pairwise(sums)), -(-sums[-1] // num_stages)), sums[-1]
    while low < high:
        limit = (low + high) // 2
        used, start = 1, 0
        for before, after in pairwise(sums):
            if after - start > limit:
                used, start = used + 1, before
        low, high = (low, limit) if used <= num_stages else (limit + 1, high)
    return low


def _kinds(names: Sequence[str]) -> str:
    """The letters of all segments. Raises ConfigError if the segments are not in the order of LETTERS."""
    kinds = "".join(KIND_OF.get(name.split(".")[0], "t") for name in names)
    order = sorted(kinds, key="EtmL".index)
    wrong = [f"{name!r} is the {LETTERS[kind]}" for name, kind, place in zip(names, kinds, order, strict=True) if kind != place]
    if wrong:
        raise ConfigError(
            f"a chain is embedding, layers, MTP layers, head, in this order; here these are out of place: {', '.join(wrong)}"
        )
    return kinds


def _letters(counts: Sequence[int], kinds: str) -> tuple[str, ...]:
    """The letters of each stage, given its number of layers."""
    bad = [f"stage {i}: {n!r}" for i, n in enumerate(counts) if not isinstance(n, int) or isinstance(n, bool) or n < 0]
    if bad or not counts:
        raise ConfigError(f"layers of stages are whole numbers, 0 or more: {', '.join(bad) or 'there are none'}")
    if sum(counts) > LONGEST:
        raise ConfigError(f"layers of stages add up to {sum(counts)}, the model has {kinds.count('t')}")
    stages = ["t" * count for count in counts]
    stages[0] = ("E" if "E" in kinds else "") + stages[0]
    stages[-1] += "m" * kinds.count("m") + ("L" if "L" in kinds else "")
    return tuple(stages)


def _mismatches(stages: Sequence[str], kinds: str, num_stages: int) -> list[str]:
    """The reasons why these stages do not fit this model, one line each."""
    wrong = []
    if len(stages) != num_stages:
        wrong.append(
            f"{num_stages} stages (ranks times chunks), the layout has {len(stages)}: "
            + ("add " if len(stages) < num_stages else "remove ")
            + f"{abs(num_stages - len(stages))} or change the number of chunks"
        )
    for letter, where in (("E", 0), ("L", -1)):
        have, want = sum(stage.count(letter) for stage in stages), int(letter in kinds)
        part, place = LETTERS[letter], "first" if where == 0 else "last"
        if have != want:
            wrong.append(f"the model has {'one' if want else 'no'} {part}, the layout has {have} {letter}")
        elif want and (not stages[where] or stages[where][where] != letter):
            wrong.append(f"{letter} ({part}) must be the {place} letter of the {place} stage, which is {stages[where]!r}")
    for letter in "tm":
        counts = [stage.count(letter) for stage in stages]
        want, have = kinds.count(letter), sum(counts)
        if have != want:
            change = f"{'add' if have < want else 'remove'} {abs(want - have)}"
            wrong.append(f"{want} {LETTERS[letter]}s, the layout has {have} ({_sum(counts)}): {change}, or give other counts")
    whole = "".join(stages).replace("E", "").replace("L", "")
    if "mt" in whole:
        wrong.append("a layer t follows an MTP layer m: MTP layers come after all layers")
    return wrong


def _sum(counts: Sequence[int]) -> str:
    """Equal neighbours drawn together: `3 + 26 x 1`. Stages without any are left out."""
    runs = [(count, len(list(run))) for count, run in groupby(counts) if count]
    return " + ".join(f"{number} x {count}" if number > 1 else str(count) for count, number in runs) or "0"


def _mistake(text: str, position: int, reason: str) -> ConfigError:
    around = text[max(0, position - 20) : position + 20]
    return ConfigError(f"cannot read the pipeline layout at character {position + 1}, in {around!r}: {reason}")


def _given(costs: Sequence[float] | None) -> str:
    return "not given" if costs is None else f"{len(costs)} numbers"
