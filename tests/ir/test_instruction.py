"""Instructions: what they say of themselves."""

import pytest

from mpar.ir import Instruction, Piece


@pytest.mark.parametrize(
    ("microbatch", "slice_", "words", "piece"),
    [
        (-1, -1, "forward layers.3", None),
        (0, -1, "forward layers.3 mb0", Piece(0, 0)),
        (2, 0, "forward layers.3 mb2.0", Piece(2, 0)),
        (2, 1, "forward layers.3 mb2.1", Piece(2, 1)),
    ],
)
def test_words_and_piece(microbatch, slice_, words, piece):
    """The first slice is named as the others are; without slices a microbatch is one piece; without both there is none."""
    instruction = Instruction("forward", "layers forward", (), (), segment="layers.3", microbatch=microbatch, slice=slice_)
    assert instruction.words == words
    assert instruction.piece == piece
