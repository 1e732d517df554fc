"""How many bytes each rank sends for a collective, by ring and pairwise algorithms, whoever issues it."""

__all__ = ["sent_bytes"]


def sent_bytes(op: str, operand_bytes: int, ranks: int) -> float:
    """The bytes that a rank sends of a collective to which it brings `operand_bytes`, as `mpar.ir` predicts its time by."""
    if op == "shift":
        return operand_bytes
    if op == "all_gather":
        return operand_bytes * (ranks - 1)
    return operand_bytes * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
