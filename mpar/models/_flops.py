"""FLOPs of a model per token, by the two conventions in use: attention counted in full, or halved because it is causal."""

from mpar import tree
from mpar.models._model import Trainable

__all__ = ["flops_per_token"]


def flops_per_token(model: Trainable, seq_len: int, *, causal: bool) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation (PaLM, arXiv:2204.02311, appendix B).

        6 N + 6 P s            N: weights that a token is multiplied with: all matrices and the head, tied or not, but not the
                               lookup in the embedding; of experts only those that the token is sent to
                               P: multiplications per pair of tokens: 2 n h in a layer of n heads of size h
                               s: seq_len

    Each product counts 2 forward, 2 for the gradient of the token, and 2 for that of the weight. A frozen weight has no gradient;
    nor have tokens in segments before the first one that trains something. Within that segment all products are counted. A model
    beside it (`Trainable.beside`) has a forward only.

    With `causal` the second term, which is attention, is halved: on average a token sees half of the others. Packed documents
    and windows let a token see fewer still, but neither convention takes that into account. Scans are not counted.
    """
    share = 0.5 if causal else 1.0
    found, frozen = model.multiplications, model.frozen
    trained = {path for path in tree.paths(model.abstract_params) if path not in frozen}
    trains = [any(_within(path, root) for root in segment.paths for path in trained) for segment in model.segments]
    behind = model.segments[trains.index(True) if any(trains) else len(trains) :]  # where tokens have gradients
    flops = 0.0
    for path, count in found.weights.items():
        has_gradient = any(_within(path, root) for segment in behind for root in segment.paths)
        flops += 2 * count * (1 + has_gradient + (path in trained))
    names = {segment.name for segment in behind}
    flops += sum(2 * pairs * (3 if name in names else 1) for name, pairs in found.pairs.items()) * seq_len * share
    if model.beside is None:
        return flops
    other = model.beside.multiplications
    return flops + 2 * (sum(other.weights.values()) + sum(other.pairs.values()) * seq_len * share)


def _within(path: str, root: str) -> bool:
    return f"{path}.".startswith(f"{root}.")
