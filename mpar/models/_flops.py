"""FLOPs that a token costs a model, by the two conventions in use."""

from mpar import tree
from mpar.models._model import Model

__all__ = ["flops_per_token"]


def flops_per_token(model: Model, seq_len: int, *, causal: bool) -> float:
    """FLOPs of the model for one token, forward and backward, recomputation left out (PaLM, arXiv:2204.02311, appendix B).

        6 N + 12 L n h s       N: weights that a token is multiplied with: all matrices, the head (tied or not), not the lookup
                               in the embedding; L layers, n heads of size h, s = seq_len
    With `causal` the second term, of attention, is halved: a token sees half of the others on average. Documents packed into a
    sequence see less of each other, which neither convention counts.
    """
    config = model.config
    paths = tree.leaves_with_path(model.abstract_params)
    stored = {path: leaf.numel() for path, leaf in paths if path.startswith("layers.") and leaf.ndim > 1}
    matrices = sum(count for path, count in stored.items() if "bias" not in path)  # those of heads have two dims
    weights = matrices + config.vocab_size * config.hidden_size
    attention = 12 * config.num_layers * config.num_heads * config.head_size * seq_len
    return 6 * weights + (attention / 2 if causal else attention)
