"""Traits: what rows of a traced model allow. The self-check finds them by trying, on the small model that it compares."""

from dataclasses import dataclass

from mpar.models.traced._attention import ATTENTION

__all__ = ["Traits"]


@dataclass(frozen=True)
class Traits:
    """permutable:     whether tokens may stand in any order, if their positions are given.
    documents:      whether several documents may share a row, each with positions of its own.
    continues:      whether a row may be read in parts, each of which reads of the earlier ones what attention carries on.
    first_position: the position of the first token, as the model counts.
    attention:      the name of the attention that transformers calls: mpar's, or "eager", torch ops with a mask, for a model that
                    computes attention by itself.
    """

    permutable: bool = True
    documents: bool = True
    continues: bool = True
    first_position: int = 0
    attention: str = ATTENTION
