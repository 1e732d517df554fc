"""FLOPs of a model per token, by the two conventions in use: attention counted in full, or halved because it is causal."""

import re

from mpar import tree
from mpar.models._model import Model
from mpar.models.layers import MoeConfig, part_of

__all__ = ["flops_per_token"]


def flops_per_token(model: Model, seq_len: int, *, causal: bool) -> float:
    """FLOPs of the model for one token, forward and backward, without recomputation (PaLM, arXiv:2204.02311, appendix B).

        6 N + 6 P s            N: weights that a token is multiplied with: all matrices and the head, tied or not, but not the
                               lookup in the embedding; of experts only those that the token is sent to
                               P: multiplications per pair of tokens: 2 n h in a layer of n heads of size h
                               s: seq_len

    With `causal` the second term, which is attention, is halved: on average a token sees half of the others. Packed documents
    and windows let a token see fewer still, but neither convention takes that into account. Scans are not counted.
    """
    config = model.config
    layers = {f"layers.{i}": layer for i, layer in enumerate(config.layers)}
    weights = float(config.vocab_size * config.hidden_size)
    if config.multi_token is not None:
        layers["mtp"] = config.multi_token.layer
        weights *= 2  # the layer for further tokens uses the same head a second time
    for path, leaf in tree.leaves_with_path(model.abstract_params):
        index = re.match(r"layers\.\d+|mtp", path)
        if index is None or leaf.ndim < 2 or "bias" in path:  # biases of heads have two dims
            continue
        mlp, axes = layers[index[0]].mlp, tree.get(model.param_axes, path)
        share = mlp.top_k / mlp.num_experts if axes[0] == "expert" and isinstance(mlp, MoeConfig) else 1.0
        weights += leaf.numel() * share
    attention = 6.0 * seq_len * sum(part_of(part).pairs(part) for layer in layers.values() for part in layer.parts)
    return 6 * weights + (attention / 2 if causal else attention)
