"""The numbers of tokens by which training drops."""

import pytest
import torch

from mpar import models, ops
from mpar.errors import ConfigError, DtypeError, ShapeError

TOKENS = torch.zeros(6, 5, dtype=torch.int64)


def draws(seed, step, rows=range(6)):
    batch = {"tokens": TOKENS[list(rows)]}
    return models.with_draws(batch, seed=seed, step=step, rows=rows, num_rows=6)["draw"]


def test_no_two_tokens_of_a_training_have_one_number():
    """Steps, rows and positions count on; another seed begins elsewhere; a part of the rows has its part of the numbers."""
    steps = torch.stack([draws(7, step) for step in range(4)])
    assert torch.equal(steps.flatten().diff(), torch.ones(119, dtype=torch.int64))
    assert not set(draws(8, 0).flatten().tolist()) & set(steps.flatten().tolist())
    assert torch.equal(draws(7, 2, [4, 1]), steps[2][[4, 1]])
    assert (steps >= 0).all() and (draws(7, 2**45) >= 0).all()


def test_what_is_dropped_depends_on_all_of_its_keys():
    """Token, feature, head, segment and label; the share is the rate, and the rest is scaled."""
    x, draw = torch.ones(8, 16, 4, 32, dtype=torch.float64), draws(0, 0).new_tensor(range(128)).view(8, 16)
    zero, one = torch.tensor(0), torch.tensor(1)
    y = ops.token_dropout(x, 0.25, draw, zero, "a")
    assert set(y.flatten().tolist()) == {0.0, 1 / 0.75}
    assert abs((y == 0).double().mean() - 0.25) < 0.02
    others = [
        ops.token_dropout(x, 0.25, draw, one, "a"),
        ops.token_dropout(x, 0.25, draw, zero, "b"),
        ops.token_dropout(x, 0.25, draw + 2**40, zero, "a"),
        *(y.roll(1, dim) for dim in range(4)),
    ]
    for other in others:  # masks that have nothing to do with each other agree as often as chance has it
        assert abs(((y == 0) == (other == 0)).double().mean() - (0.25**2 + 0.75**2)) < 0.03
    assert torch.equal(ops.token_dropout(x[2:], 0.25, draw[2:], zero, "a"), y[2:])
    assert ops.token_dropout(x, 0.0, draw, zero, "a") is x


def test_wrong_operands_are_refused():
    """Rates, dims and dtypes that make no sense."""
    draw, zero = draws(0, 0), torch.tensor(0)
    with pytest.raises(ConfigError, match="rate is 1"):
        ops.token_dropout(torch.ones(6, 5, 2), 1.0, draw, zero, "a")
    with pytest.raises(ShapeError, match="does not fit draw"):
        ops.token_dropout(torch.ones(6, 4, 2), 0.5, draw, zero, "a")
    with pytest.raises(ShapeError, match="segment a scalar"):
        ops.token_dropout(torch.ones(6, 5, 2), 0.5, draw, draw, "a")
    with pytest.raises(DtypeError, match="needs a floating dtype"):
        ops.token_dropout(torch.ones(6, 5, 2, dtype=torch.int64), 0.5, draw, zero, "a")
