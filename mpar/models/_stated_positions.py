"""Stated positions: for rows of which length a model was made, as its Hugging Face config says."""

from typing import Any, cast

from mpar.models._model import Trainable

__all__ = ["stated_positions"]


def stated_positions(model: Trainable) -> int | None:
    """For how many positions a model was made: `max_position_embeddings`, times the factor of a RoPE that the config stretches
    (linear, dynamic), or as many as YaRN makes of the original ones. None if the config does not say it.

    It is no bound unless positions are learned (`Trainable.max_positions`): behind it answers get worse, or not.
    """
    config = cast(dict[str, Any], model.hf_config or {})
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if factor is None or kind not in ("linear", "dynamic", "yarn"):
        return positions
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or positions
    return max(positions, int(factor * (original if kind == "yarn" else positions)))
