"""What control flow computes: a scan, a choice between two branches, a loop while a test holds. Bodies are functions of lists.

A body takes its operands out of the list that it is given, so that each is freed after its last use. The tensors that it returns
as carries and as terms of sums share their memory with nothing else.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["cond", "scan", "while_loop"]

Body = Callable[[list[Tensor]], Sequence[Tensor]]


def scan(
    operands: Sequence[Tensor], *, body: Body, num_carries: int, num_xs: int, num_sums: int, length: int, reverse: bool
) -> list[Tensor]:
    """Apply `body` to each slice of the xs along dim 0, one after the other.

    operands: (carries, xs, captured). Every turn gets the carries of the turn before, its slices, and the captured tensors.
    body:     (carries, slices, captured) -> (carries, ys, terms of sums).
    reverse:  whether the last slice comes first. Slices of results lie where those of the xs lie.

    Returns (last carries, stacked ys, sums over all `length` turns); there is at least one.
    """
    xs, captured = operands[num_carries : num_carries + num_xs], operands[num_carries + num_xs :]
    carries, stacks, sums = list(operands[:num_carries]), list[Tensor](), list[Tensor]()
    for turn in reversed(range(length)) if reverse else range(length):
        given = [*carries, *(x[turn] for x in xs), *captured]
        carries.clear()
        results = list(body(given))
        first_sum = len(results) - num_sums
        carries = results[:num_carries]
        stacks = _put(stacks, results[num_carries:first_sum], turn, length)
        sums = _added(sums, results[first_sum:])
        results.clear()
    return [*carries, *stacks, *sums]


def _put(stacks: list[Tensor], ys: list[Tensor], turn: int, length: int) -> list[Tensor]:
    """The stacks with the ys of a turn in their places; the first turn makes them."""
    stacks = stacks or [y.new_empty((length, *y.shape)) for y in ys]
    for stack, y in zip(stacks, ys, strict=True):
        stack[turn] = y
    return stacks


def _added(sums: list[Tensor], terms: list[Tensor]) -> list[Tensor]:
    """The sums with the terms of a turn; those of the first turn become the sums."""
    return [total.add_(term) for total, term in zip(sums, terms, strict=True)] if sums else terms


def cond(operands: Sequence[Tensor], *, if_true: Body, if_false: Body) -> list[Tensor]:
    """The results of `if_true` if the first operand is true, else those of `if_false`; both take the other operands."""
    predicate, *given = operands
    return list(if_true(given) if bool(predicate) else if_false(given))


def while_loop(operands: Sequence[Tensor], *, test: Body, body: Body, num_carries: int) -> list[Tensor]:
    """Apply `body` as long as `test` holds. Both take (carries, captured); the body returns the next carries."""
    carries, captured = [x.clone() for x in operands[:num_carries]], operands[num_carries:]  # there may be no turn
    while bool(test([*carries, *captured])[0]):
        given = [*carries, *captured]
        carries.clear()
        carries = list(body(given))
    return carries
