"""State: what parameters a program takes."""

import pytest
import torch

from mpar import Mesh, compile_step
from mpar.errors import ShapeError
from mpar.optim import AdamW


def test_parameters_that_do_not_fit_are_all_named(make_model):
    """What is missing, what is too much, and what has another shape or dtype, in one error."""
    model = make_model(torch.float32)
    program = compile_step(model, AdamW(lr=1e-3), Mesh(fsdp=2), "zero3", (8, 8))
    params = {"embed": {"table_VD": torch.zeros(3, 5)}, "extra": torch.zeros(2)}
    with pytest.raises(ShapeError, match="these parameters do not fit the program") as caught:
        program.init_state(params)
    text = str(caught.value)
    assert "params.head.norm_D is missing" in text
    assert "params.extra is not in the program" in text
    assert "params.embed.table_VD is torch.float32 (3, 5), the program has torch.float32 (" in text
