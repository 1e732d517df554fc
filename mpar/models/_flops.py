"""FLOPs of a model per token, by the two conventions in use: attention counted in full, or halved because it is causal."""

from mpar.models._model import Trainable

__all__ = ["flops_per_token"]


def flops_per_token(model: Trainable, seq_len: int, *, causal: bool) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation (PaLM, arXiv:2204.02311, appendix B).

        6 N + 6 P s            N: weights that a token is multiplied with: all matrices and the head, tied or not, but not the
                               lookup in the embedding; of experts only those that the token is sent to
                               P: multiplications per pair of tokens: 2 n h in a layer of n heads of size h
                               s: seq_len

    With `causal` the second term, which is attention, is halved: on average a token sees half of the others. Packed documents
    and windows let a token see fewer still, but neither convention takes that into account. Scans are not counted.
    """
    weights, pairs = model.multiplications
    attention = 6.0 * seq_len * pairs
    return 6 * weights + (attention / 2 if causal else attention)
