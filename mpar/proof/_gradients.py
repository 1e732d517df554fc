"""Gradients: each stored gradient is the sum of the contributions of all pieces, each once, in the order of the schedule."""

from collections import Counter
from collections.abc import Mapping

from mpar.errors import ProgramError
from mpar.ir import Piece, ProgramData
from mpar.proof._labels import Contributed, Label, Sum, Terms, as_text, before_reduction, reduced

__all__ = ["check_gradients"]

Items = Counter[tuple[str, Piece | None]]


def check_gradients(program: ProgramData, terms: Terms, labels: Mapping[int, Label]) -> None:
    """Raise ProgramError unless every finished gradient is the sum that follows from the schedule. labels: of all values."""
    uses = _uses(program)
    expected = _expected(program, terms, uses)
    for position, part in enumerate(program.parts):
        for path, value in part.gradients.items():
            if labels[value] != expected[path]:
                segments = {use.rstrip("'") for use in uses[path]}
                _refuse_unless_complete(path, _items(terms, path, labels[value]), segments, program)
                where = f"pp={position} " if len(program.parts) > 1 else ""
                why = "is not added in the order of the schedule, or is not reduced once"
                raise ProgramError(f"invalid program: {where}the gradient of {path} {why}")


def _uses(program: ProgramData) -> dict[str, dict[str, int]]:
    """For the path of each parameter: its uses, and the position along pp of each use."""
    uses: dict[str, dict[str, int]] = {}
    for position, part in enumerate(program.parts):
        for contribution in part.contributions.values():
            uses.setdefault(contribution.path, {})[contribution.use] = position
    return uses


def _expected(program: ProgramData, terms: Terms, uses: Mapping[str, Mapping[str, int]]) -> dict[str, Label]:
    """For each path, the label that its gradient should have. It adds, for each use, microbatches in the order of the schedule,
    and then the sums of all uses in the order of the chain."""
    facts, orders = program.facts, _backwards(program)
    place_in_chain = {name: index for index, name in enumerate(facts.stage_of)}
    expected = {}
    for path, positions in uses.items():
        sums: list[Label] = []
        items: Items = Counter()
        for use in sorted(positions, key=lambda use: (place_in_chain[use.rstrip("'")], len(use))):
            segment = use.rstrip("'")
            order = orders.get((positions[use], facts.stage_of[segment]), [])
            microbatches = [[Piece(m, c) for c in reversed(range(program.num_slices))] for m in order]  # the last slice first
            items.update((segment, piece) for pieces in microbatches for piece in pieces)
            contributions = [[Label(Contributed(path, use), piece) for piece in pieces] for pieces in microbatches]
            if contributions and facts.reduce == "each":
                sums.append(terms.fold(reduced(terms.fold(of_microbatch)) for of_microbatch in contributions))
            elif contributions:
                sums.append(reduced(terms.fold(label for of_microbatch in contributions for label in of_microbatch)))
        _refuse_unless_complete(path, items, {use.rstrip("'") for use in positions}, program)
        expected[path] = terms.fold(sums)
    return expected


def _backwards(program: ProgramData) -> dict[tuple[int, int], list[int]]:
    """By (position, stage): the microbatches in the order in which B or W gives their contributions."""
    orders: dict[tuple[int, int], list[int]] = {}
    for position, actions in enumerate(program.schedule):
        for action in actions:
            if action.kind in "BW":
                orders.setdefault((position, action.stage), []).append(action.microbatch)
    return orders


def _items(terms: Terms, path: str, label: Label) -> Items:
    """What a label adds up, with counts, for messages: (segment, piece) for a contribution to `path`, else (text, piece)."""
    counts = Counter({before_reduction(label): 1})
    items: Items = Counter()
    for number in reversed(range(len(terms))):  # a sum has a higher number than the sums that it adds
        count = counts.pop(Label(Sum(number)), 0)
        for operand in terms.operands(Sum(number)) if count else ():
            counts[before_reduction(operand)] += count
    for (meaning, piece), count in counts.items():
        contributes = isinstance(meaning, Contributed) and meaning.path == path
        use = meaning.use.rstrip("'") if isinstance(meaning, Contributed) and contributes else as_text(Label(meaning, piece))
        items[use, piece] += count
    return items


def _refuse_unless_complete(path: str, items: Items, segments: set[str], program: ProgramData) -> None:
    """Raise ProgramError unless every piece of every segment that reads a parameter is in its gradient once."""
    complete: Items = Counter({(segment, piece): 1 for segment in segments for piece in program.pieces})
    if items != complete:
        missing, extra = (sorted(map(_as_words, difference.elements())) for difference in (complete - items, items - complete))
        raise ProgramError(
            f"invalid program: the gradient of {path} lacks the contributions {missing} (use, microbatch)"
            f" and has {extra} too often"
        )


def _as_words(item: tuple[str, Piece | None]) -> str:
    use, piece = item
    return use if piece is None else f"{use} mb{piece.microbatch}" + (f".{piece.slice}" if piece.slice else "")
