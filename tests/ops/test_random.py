"""Random numbers: the published generator, layout independence, distributions, dropout."""

import pytest
import torch

from mpar import ops
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._random import dropout_p, philox, random_normal_p, random_uniform_p

KEY = ops.fold_key(0, "test")
DRAWS = {"uniform": ops.random_uniform, "normal": ops.random_normal}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


def _words(text):
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The known answers that Random123, the authors' library, publishes for philox4x32 with 10 rounds."""
    assert [int(w) for w in philox(_words(counter), _words(key))] == [int(w) for w in _words(expected)]


@each_draw
@pytest.mark.parametrize("shape", [(11,), (5, 7), (3, 4, 9), (2, 3, 4, 5)], ids=str)
def test_a_shard_draws_its_part_of_the_whole(draw, shape):
    """Whatever part of the global index space is drawn, its bits are those of the whole."""
    whole = draw(KEY, shape)
    starts, sizes = [n // 3 for n in shape], [n - n // 3 - n // 4 for n in shape]
    part = whole[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
    assert torch.equal(draw(KEY, sizes, starts=starts), part)


def test_quads_are_parts_of_vectors():
    """Four neighbours, for each key those of its own vector."""
    keys = [KEY, ops.fold_key(1, "test"), ops.fold_key(2, "test")]
    expected = torch.stack([ops.random_uniform(keys[k], (40,))[4 * q : 4 * q + 4] for k, q in ((0, 0), (2, 9), (1, 3), (2, 0))])
    assert torch.equal(ops.random_quads(torch.tensor(keys)[[0, 2, 1, 2]], torch.tensor([0, 9, 3, 0])), expected)


@each_draw
def test_keys_and_positions_are_unrelated(draw):
    """Other keys give other numbers, and no number stands twice in a small tensor."""
    draws = [draw(key, (8, 9)) for key in (KEY, ops.fold_key(1, "test"), ops.fold_key(0, "other"), ops.fold_in(KEY, 1))]
    assert torch.stack(draws).unique().numel() == 4 * 72
    assert ops.fold_key(0, "1") != ops.fold_key(0, 1) and ops.fold_key(0, "ab", "c") != ops.fold_key(0, "a", "bc")
    assert torch.equal(ops.fold_in(KEY, 3), ops.fold_in(torch.tensor(KEY), torch.tensor(3)))


def test_moments():
    """A hundred thousand numbers have the mean, variance and fourth moment of their distribution, within four deviations."""
    u, z = ops.random_uniform(KEY, (100, 1000)).double(), ops.random_normal(KEY, (100, 1000)).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 4e-3 and abs(u.var() - 1 / 12) < 1e-3
    assert abs(z.mean()) < 1.3e-2 and abs(z.var() - 1) < 1.8e-2 and abs(z.pow(4).mean() - 3) < 0.13
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < 1.3e-2 and abs((z[:-1] * z[1:]).mean()) < 1.3e-2


def test_dropout_drops_and_scales(make_tensor):
    """The share that is dropped is the rate, the rest is divided by 1 - rate, and the gradient has the same mask."""
    x = make_tensor((50, 60), torch.float64, requires_grad=True)
    y = ops.dropout(x, 0.3, KEY)
    kept = y != 0
    assert abs(kept.double().mean().item() - 0.7) < 0.035
    assert torch.equal(y[kept], x[kept] / 0.7)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, kept.double() / 0.7)
    assert ops.dropout(x, 0.0, KEY) is x


@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_programs_draw_the_whole(dim, make_tensor, run_sharded):
    """Two shards of any dim, put together, are what one rank draws."""
    x, key = make_tensor((4, 6)), torch.tensor(KEY)
    extents = {"d0": 4, "d1": 6}
    extents[f"d{dim}"] //= 2
    (y,), _ = run_sharded(dropout_p, f"d{dim}", extents, list(x.chunk(2, dim)), key, rate=0.5, starts=[0, 0])
    assert torch.equal(torch.cat(list(y), dim), ops.dropout(x, 0.5, KEY))
    for primitive, draw in ((random_uniform_p, ops.random_uniform), (random_normal_p, ops.random_normal)):
        (y,), _ = run_sharded(primitive, f"d{dim}", extents, [key, key], shape=[4, 6], starts=[0, 0])
        assert torch.equal(torch.cat(list(y), dim), draw(KEY, (4, 6)))


def test_wrong_operands_are_refused(make_tensor):
    """Rates, keys, ranks and dtypes that make no sense."""
    with pytest.raises(ConfigError, match="rate is 1"):
        ops.dropout(make_tensor((3,)), 1.0, KEY)
    with pytest.raises(DtypeError, match="floating"):
        ops.dropout(torch.arange(3), 0.5, KEY)
    with pytest.raises(ShapeError, match="at most 4 dims"):
        ops.random_uniform(KEY, (1,) * 5)
    with pytest.raises(ShapeError, match="one start each"):
        ops.random_uniform(KEY, (2, 3), starts=(1,))
    with pytest.raises(ShapeError, match="must not be negative"):
        ops.random_normal(KEY, (2,), starts=(-1,))
    with pytest.raises(ShapeError, match="int64 tensor"):
        ops.random_uniform(torch.tensor([1, 2, 3]), (2,))
