"""Checks the sizes that a schedule is called with."""

from mpar.errors import ConfigError

__all__ = ["check_sizes"]


def check_sizes(
    name: str, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int = 1, rules: dict[str, bool] | None = None
) -> None:
    """Raise ConfigError, listing all problems, if a size is below 1, if `rank` is not below `num_ranks`, or if a rule is broken.

    rules: for the text of each rule, whether it holds.
    """
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    wrong = [f"{key} is {value}, needs to be 1 or more" for key, value in sizes.items() if value < 1]
    if not wrong and not 0 <= rank < num_ranks:
        wrong = [f"rank is {rank}, needs to be 0 .. {num_ranks - 1}"]
    if not wrong and rules:
        wrong = [text for text, holds in rules.items() if not holds]
    if wrong:
        given = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise ConfigError(f"{name}: no order for {given}: {'; '.join(wrong)}")
